"""The options that say whom to trust, the same for every command that verifies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kernseal.loader.policy import Policy

OPTIONS = (
    click.option(
        "--pins", type=click.Path(path_type=Path), help="A lock file, or a folder of them, to trust."
    ),
    click.option(
        "--key",
        "keys",
        multiple=True,
        type=click.Path(path_type=Path),
        help="A public key file, or a folder of them, to trust.",
    ),
    click.option("--threshold", type=int, help="How many of the keys must have signed."),
    click.option("--both", is_flag=True, help="Ask for pins and signatures, not one of the two."),
    click.option("--min-version", help="Refuse bundles of an older kernseal than this, e.g. 0.2.0."),
    click.option("--manifest-sha256", help="Accept only the manifest with this SHA-256."),
)


def trusting(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options, and gives ``command`` what they say as ``policy``.

    Raises (when the command is called):
        VerificationFailed, InvalidArgument: as ``Policy.from_options``.
    """

    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        pins, keys, threshold = (values.pop(name) for name in ("pins", "keys", "threshold"))
        limits = {name: values.pop(name) for name in ("both", "min_version", "manifest_sha256")}
        command(**values, policy=Policy.from_options(pins, keys, threshold, **limits))

    for option in reversed(OPTIONS):
        wrapped = option(wrapped)
    return wrapped
