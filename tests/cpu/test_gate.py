"""The gate passes on what is pinned, and for each kind of change says which input moved which artifact."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from builds import PACKED, compile_cache
from click.testing import CliRunner

from kernseal.export import assemble, build, gate, lock, paths, source, spec, toolchain
from kernseal.export.build import Options
from kernseal.export.cli import main
from kernseal.export.progress import Silent
from kernseal.loader.errors import BuildFailed, Missing
from kernseal.loader.pins import parse_pins

KEY = f"gdn_prefill/{PACKED}"
ALPHA = "flashinfer/gdn_kernels/delta_rule_dsl/alpha.py"


class Workshop:
    """A copy of the data folders in which a test may change things, with the pins of an unchanged build."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.options = Options(only=(PACKED,), jobs=1)
        for name in ("kernels", "patches", "manifests"):
            shutil.copytree(getattr(paths, name)(), root / name)
            monkeypatch.setattr(paths, name, lambda name=name: root / name)
        source.all_wanted.cache_clear()

    def result(self) -> gate.Comparison:
        ops = spec.load_ops()
        with compile_cache():
            return gate.gate(ops, spec.parse_target("90", None, ops), self.options, Silent(), update=False)

    def moves(self) -> list[tuple[str, str, tuple[str, ...]]]:
        return [(move.artifact, move.what, move.because) for move in self.result().moves]

    def edit(self, name: str, change: Callable[[str], str]) -> None:
        path = self.root / name
        before = path.read_text()
        after = change(before)
        assert after != before, name
        path.write_text(after)


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    return Workshop(tmp_path, monkeypatch)


@pytest.mark.slow
def test_what_is_pinned_passes(workshop: Workshop) -> None:
    result = workshop.result()
    assert result.ok, result.moves
    assert (result.compared, result.partial) == (1, True)


@pytest.mark.slow
@pytest.mark.parametrize("sm", ["100", "103", "120", "121"])
def test_a_variant_of_every_other_sm_is_as_pinned(sm: str) -> None:
    ops = spec.load_ops()
    with compile_cache():
        result = gate.gate(
            ops, spec.parse_target(sm, None, ops), Options(only=(PACKED,), jobs=2), Silent(), update=False
        )
    assert result.ok, result.moves


@pytest.mark.slow
def test_a_changed_source_file_is_named_with_the_code_it_moved(workshop: Workshop) -> None:
    opened, _ = source.open_source(None, source.upstream())
    changed = workshop.root / "source"
    for name in {**source.all_wanted(), **source.upstream().licences}:
        path = changed / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(opened.read(name) or b"")
    (changed / "flashinfer" / "data").mkdir(exist_ok=True)
    text = (changed / ALPHA).read_text()
    assert "1e-10" in text
    (changed / ALPHA).write_text(text.replace("1e-10", "2e-10"))
    digest = source.files.sha256_bytes((changed / ALPHA).read_bytes())
    workshop.edit(
        "kernels/gdn_prefill/source_set.json", lambda t: json.dumps({**json.loads(t), ALPHA: digest})
    )
    workshop.options = replace(workshop.options, source=changed)
    assert workshop.moves() == [(KEY, "code", (f"source: {ALPHA}",))]


@pytest.mark.slow
def test_a_changed_patch_is_named_with_the_code_it_moved(workshop: Workshop) -> None:
    patch = "source/gdn_prefill/0003-empty-sequence-state.patch"
    workshop.edit(
        f"patches/{patch}",
        lambda t: t.replace(
            "+        if write_row >= cutlass.Int32(0):", "+        if write_row >= cutlass.Int32(1):"
        ),
    )
    moved = workshop.moves()
    assert moved == [(KEY, "code", (f"patches: {patch}",))]


@pytest.mark.slow
def test_a_changed_ptx_rule_is_named(workshop: Workshop) -> None:
    rule = {
        "name": "stamp",
        "reason": "a test",
        "upstream": "none",
        "remove_when": "never",
        "sms": ["sm_90a"],
        "ops": "all",
        "pattern": "(?m)^\\.address_size 64$",
        "replacement": ".address_size 64\n.visible .global .align 4 .u32 stamp = 7;",
        "expect": 1,
    }
    (workshop.root / "patches" / "ptx" / "stamp.yaml").write_text(yaml.safe_dump(rule))
    assert workshop.moves() == [(KEY, "code", ("patches: ptx/stamp (added)",))]


@pytest.mark.slow
def test_a_changed_flag_is_named(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "FLAGS", (*assemble.FLAGS, "--warn-on-spills"))
    ((artifact, what, because),) = workshop.moves()
    assert (artifact, because) == (KEY, ("flags: ptxas",))
    assert what in ("inputs", "metadata")


@pytest.mark.slow
def test_a_flag_that_changes_the_program_is_not_built_at_all(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "FLAGS", (*assemble.FLAGS, "--generate-line-info"))
    with pytest.raises(BuildFailed, match="is not that of the DSL's"):
        workshop.result()


@pytest.mark.slow
def test_a_changed_compiler_is_named(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = [
        replace(t, pin="0" * 64) if t.name == "nvidia-cuda-nvcc" else t for t in toolchain.inspect_toolchain()
    ]
    monkeypatch.setattr(toolchain, "inspect_toolchain", lambda: tools)
    assert workshop.moves() == [(KEY, "inputs", ("toolchain: nvidia-cuda-nvcc",))]


@pytest.mark.slow
def test_a_changed_recipe_is_named(workshop: Workshop) -> None:
    workshop.edit("kernels/gdn_prefill/recipe.py", lambda t: t + "\n# a remark\n")
    assert workshop.moves() == [(KEY, "inputs", ("recipe: recipe.py",))]


def test_a_variant_added_or_removed_is_named() -> None:
    pinned = json.loads(lock.path_of(spec.parse_target("90", None, spec.load_ops())).read_text())
    fewer = {**pinned, "variants": {key: value for key, value in pinned["variants"].items() if key != KEY}}
    made = build.plan(spec.load_ops(), spec.parse_target("90", None, spec.load_ops()), Options())
    removed = lock.compare(made, pinned, fewer, partial=False)
    added = lock.compare(made, fewer, pinned, partial=False)
    assert [(m.artifact, m.what) for m in removed] == [(KEY, "removed")]
    assert [(m.artifact, m.what) for m in added] == [(KEY, "added")]
    assert "variant" in added[0].reason


def test_bytes_that_moved_without_an_input_are_called_what_they_are() -> None:
    target = spec.parse_target("90", None, spec.load_ops())
    pinned = json.loads(lock.path_of(target).read_text())
    other = json.loads(json.dumps(pinned))
    other["variants"][KEY]["cubin"] = other["variants"][KEY]["code"] = "0" * 64
    (move,) = lock.compare(build.plan(spec.load_ops(), target, Options()), pinned, other, partial=False)
    assert move.what == "code"
    assert "NO INPUT MOVED" in move.reason


def test_a_target_without_pins_says_how_to_write_them(workshop: Workshop) -> None:
    for path in (workshop.root / "manifests").glob("sm_90a*.lock.json"):
        path.unlink()
    with pytest.raises(
        Missing,
        match=r"manifests/sm_90a\.lock\.json: no pins for sm_90a; `kernseal gate --sm sm_90a --update`",
    ):
        workshop.result()


@pytest.mark.slow
def test_the_command_exits_with_10_and_writes_a_summary(workshop: Workshop) -> None:
    workshop.edit("kernels/gdn_prefill/recipe.py", lambda t: t + "\n# a remark\n")
    summary = workshop.root / "gate.md"
    with compile_cache():
        result = CliRunner().invoke(
            main, ["gate", "--sm", "90", "--variant", PACKED, "--summary", str(summary), "--json"]
        )
    assert result.exit_code == 10, result.output
    (report,) = json.loads(result.output)
    assert report["moves"][0]["because"] == ["recipe: recipe.py"]
    assert f"| `{KEY}` | inputs | recipe: recipe.py |" in summary.read_text()


def test_every_sm_has_committed_pins_and_they_parse() -> None:
    ops = spec.load_ops()
    wanted = [spec.parse_target(sm, None, ops) for sm in spec.all_targets(ops)] + [
        spec.parse_target("120", "90", ops)
    ]
    for target in wanted:
        pins = parse_pins(lock.path_of(target).read_bytes(), target.name)
        assert (pins.sm, pins.retarget) == (target.sm, target.retarget)
        names = [variant.key for op in ops for variant in op.variants(target, "default")]
        assert sorted(f"cubin/{name}.cubin" for name in names) == sorted(
            n for n in pins.files if n.startswith("cubin/")
        )
