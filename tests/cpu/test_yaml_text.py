"""YAML is read by libyaml, to the same values."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from builds import ROOT

from kernseal.abi import yaml_text

FILES = sorted((*ROOT.glob("kernels/**/*.yaml"), *ROOT.glob("abi/*.yaml"), *ROOT.glob("patches/**/*.yaml")))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_file_means_the_same_without_libyaml(path: Path) -> None:
    text = path.read_text()
    assert yaml_text.load(text) == yaml.safe_load(text)


def test_libyaml_is_what_reads() -> None:
    assert yaml_text.LOADER is yaml.CSafeLoader


def test_no_object_is_made_of_a_tag() -> None:
    with pytest.raises(yaml.YAMLError, match="python/object"):
        yaml_text.load("!!python/object/apply:os.getcwd []")
