"""Loads the ``recipe.py`` of an op, in a compile worker."""

from __future__ import annotations

import importlib.util
import types


def load_recipe(path: str) -> types.ModuleType:
    """The module at ``path``, which need not be importable by name.

    Raises:
        ImportError: nothing there can be loaded.
    """
    spec = importlib.util.spec_from_file_location("kernseal_recipe", path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
