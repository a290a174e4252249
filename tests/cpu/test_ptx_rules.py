"""PTX rules: the count they expect is the count they must find."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kernseal.export import paths, ptx
from kernseal.export.ptx import PtxRule
from kernseal.export.spec import Target, Variant
from kernseal.loader.errors import Malformed, RuleFailed

SM120, SM90 = Target("sm_120a"), Target("sm_90a")
VARIANT = Variant("gdn_prefill", "sm120", {}, "v")
CLUSTER = "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
TEXT = f".version 9.4\n\t{CLUSTER} [%r1];\n\tret;\n\t{CLUSTER} [%r2];\n"


def rule(expect: int) -> PtxRule:
    (committed,) = ptx.load(paths.patches() / "ptx")
    return PtxRule(**{**committed.__dict__, "expect": expect})


def test_cluster_scoped_loads_become_cta_scoped() -> None:
    text, counts = ptx.apply(TEXT, [rule(2)], VARIANT, SM120)
    assert text == TEXT.replace("shared::cluster", "shared::cta")
    assert counts == {"sm12x-tma-cluster-loads": 2}


@pytest.mark.parametrize("expect", [0, 1, 3])
def test_another_count_fails_with_file_and_lines(expect: int) -> None:
    with pytest.raises(
        RuleFailed, match=rf"gdn_prefill/v\.ptx for sm_120a: expected {expect} places, found 2 \(lines 2, 4\)"
    ):
        ptx.apply(TEXT, [rule(expect)], VARIANT, SM120)


def test_fewer_than_expected_fails_too() -> None:
    with pytest.raises(RuleFailed, match=r"expected 1 places, found 0 \(lines none\)"):
        ptx.apply("ret;\n", [rule(1)], VARIANT, SM120)


def test_a_rule_leaves_other_sms_alone() -> None:
    assert ptx.apply(TEXT, [rule(0)], VARIANT, SM90) == (TEXT, {})


def test_a_retargeted_build_follows_the_rules_of_the_sm_it_is_compiled_for() -> None:
    assert ptx.apply(TEXT, [rule(0)], VARIANT, Target("sm_120a", "sm_90a")) == (TEXT, {})


@pytest.mark.parametrize(
    "change",
    [{"expect": -1}, {"expect": "many"}, {"surprise": 1}, {"reason": None, "remove": "reason"}],
    ids=["negative count", "count in words", "unknown field", "missing field"],
)
def test_a_rule_file_that_is_not_one_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    (committed,) = (paths.patches() / "ptx").glob("*.yaml")
    data = yaml.safe_load(committed.read_text())
    removed = change.pop("remove", None)
    data.update(change)
    if removed:
        del data[removed]
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(Malformed, match=r"patches/ptx/r\.yaml"):
        ptx.load(tmp_path)
