"""What is generated is what the YAML says, what C compilers see, and a superset of every released ABI."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import cffi
import pytest
import yaml
from cpu.fake_driver.native import STRICT, ZIG, compile_c, compiler

from kernseal.abi import generate, library, model, render
from kernseal.loader import errors

ROOT = Path(__file__).resolve().parents[2]
ABI = model.load()
GENERATED = [*generate.TEMPLATES, "abi/generated/abi.json"]
RELEASED = sorted((ROOT / "abi" / "released").glob("*.json"))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The parts of the repository that the generator reads and writes."""
    ignore = shutil.ignore_patterns("target", "__pycache__", "examples")
    for name in ("abi", "kernels"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "abi.md", tmp_path / "docs")
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_committed_files_are_what_the_yaml_gives() -> None:
    assert generate.main(["--check"]) == 0


def test_generating_twice_gives_the_same_bytes(copy: Path) -> None:
    assert generate.main(["--root", str(copy)]) == 0
    for path in GENERATED:
        assert (copy / path).read_bytes() == (ROOT / path).read_bytes(), path


@pytest.mark.parametrize("path", GENERATED)
def test_a_changed_file_is_named(copy: Path, capsys: pytest.CaptureFixture[str], path: str) -> None:
    with (copy / path).open("a") as file:
        file.write("\n")
    assert generate.main(["--check", "--root", str(copy)]) == 1
    assert capsys.readouterr().err.splitlines()[0].startswith(f"{path}: ")


def test_a_missing_file_is_named(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "docs" / "abi.md").unlink()
    assert generate.main(["--check", "--root", str(copy)]) == 1
    assert capsys.readouterr().err.startswith("docs/abi.md: ")


def test_a_field_added_to_kernel_yaml_changes_every_declaration(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = '    - {name: stream, type: stream, doc: "CUstream to launch on; null is the legacy default stream."}\n'
    added = '    - {name: added, type: u32, since: "1.1", doc: "New."}\n'
    edit(copy / "kernels" / "gdn_prefill" / "kernel.yaml", stream, stream + added)
    assert generate.main(["--check", "--root", str(copy)]) == 1
    named = {line.split(":")[0] for line in capsys.readouterr().err.splitlines()}
    assert named == set(GENERATED) - {"abi/generated/kernseal_ops.h"}
    args = model.load(copy / "abi", copy / "kernels").op("gdn_prefill").args
    before = ABI.op("gdn_prefill").args
    assert (args.size, args.min_size) == (before.size + 8, before.size), "callers of 1.0 stay welcome"


def test_a_config_with_a_stream_has_it_asked_about_capture(copy: Path) -> None:
    ops = copy / "abi" / "generated" / "kernseal_ops.c"
    device = '    - {name: device, type: i32, doc: "'
    yaml_path = copy / "kernels" / "gdn_prefill" / "kernel.yaml"
    lines = [line for line in yaml_path.read_text().splitlines() if "{name: stream, type: stream" not in line]
    yaml_path.write_text("\n".join(lines) + "\n")
    assert generate.main(["--root", str(copy)]) == 0
    assert "c.device, NULL, axes" in ops.read_text()
    edit(yaml_path, device, '    - {name: stream, type: stream, doc: "S."}\n' + device)
    assert generate.main(["--root", str(copy)]) == 0
    assert "c.device, c.stream, axes" in ops.read_text()


def test_numbers_are_not_given_twice(copy: Path) -> None:
    edit(copy / "abi" / "types.yaml", "name: f16,  value: 2", "name: f16,  value: 1")
    with pytest.raises(ValueError, match="kseal_dtype: a name or number is used twice"):
        model.load(copy / "abi", copy / "kernels")


def test_an_axis_value_that_the_enum_lacks_is_refused(copy: Path) -> None:
    edit(copy / "kernels" / "gdn_prefill" / "kernel.yaml", "values: [bf16, f16]", "values: [bf16, f8]")
    with pytest.raises(KeyError, match="kseal_dtype has no value 'f8'"):
        model.load(copy / "abi", copy / "kernels")


def compare_with_c(folder: Path, command: list[str], *flags: str) -> None:
    """Compiles one assertion for every number, size, offset and prototype of abi.json."""
    dump = json.loads((ROOT / "abi" / "generated" / "abi.json").read_text())
    lines = [
        '#include "kernseal.h"',
        "#include <stddef.h>",
        "#ifdef __cplusplus",
        "#define _Static_assert static_assert",
        "#endif",
    ]
    for values in dump["enums"].values():
        lines += [f'_Static_assert({name} == {value}, "{name}");' for name, value in values.items()]
    for name, struct in dump["structs"].items():
        lines.append(f'_Static_assert(sizeof({name}) == {struct["size"]}, "{name}");')
        for field, at in struct["fields"].items():
            lines.append(f'_Static_assert(offsetof({name}, {field}) == {at["offset"]}, "{name}.{field}");')
            lines.append(f'_Static_assert(sizeof((({name} *)0)->{field}) == {at["size"]}, "{name}.{field}");')
    lines += ["#ifdef __cplusplus", 'extern "C" {', "#endif"]
    lines += [f"{prototype};" for prototype in dump["functions"].values()]
    lines += ["#ifdef __cplusplus", "}", "#endif", "int main(void) { return KSEAL_ABI_VERSION == 0; }"]
    source = folder / ("dump.cpp" if "-xc++" in flags else "dump.c")
    source.write_text("\n".join(lines) + "\n")
    compile_c(command, [source], folder / "dump", f"-I{library.header().parent}", *flags)


def test_c_sees_the_dump(tmp_path: Path) -> None:
    compare_with_c(tmp_path, list(ZIG), *STRICT)


def test_cplusplus_sees_the_dump(tmp_path: Path) -> None:
    compare_with_c(
        tmp_path, [*ZIG[:-1], "c++"], "-xc++", "-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Werror"
    )


def test_cffi_sees_the_dump() -> None:
    ffi = cffi.FFI()
    ffi.cdef(library.cdef())
    dump = render.dump(ABI)
    for name, struct in dump["structs"].items():
        assert ffi.sizeof(name) == struct["size"], name
        for field, at in struct["fields"].items():
            assert ffi.offsetof(name, field) == at["offset"], f"{name}.{field}"


def test_rust_has_every_name() -> None:
    text = (ROOT / "abi" / "generated" / "kernseal.rs").read_text()
    dump = render.dump(ABI)
    names = [*dump["functions"], *dump["structs"], *(c for values in dump["enums"].values() for c in values)]
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


def test_statuses_are_the_exceptions() -> None:
    described = yaml.safe_load((ROOT / "abi" / "status.yaml").read_text())["statuses"]
    exceptions = {e.value: (e.status, e.exit_code, e.__doc__) for e in errors.BY_VALUE.values()}
    assert exceptions == {
        s["value"]: (s["name"], s["exit"], s["doc"]) for s in described if s["name"] != "ok"
    }


def lost(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What a program built against ``old`` would miss or read wrongly in ``new``."""
    found = []
    for name, values in old["enums"].items():
        found += [c for c, value in values.items() if new["enums"].get(name, {}).get(c) != value]
    for name, struct in old["structs"].items():
        now = new["structs"].get(name, {"fields": {}, "size": 0, "min_size": 1 << 30})
        found += [f"{name}.{f}" for f, at in struct["fields"].items() if now["fields"].get(f) != at]
        if now["size"] < struct["size"] or now["min_size"] > struct["size"]:
            found.append(name)
    found += [f for f, prototype in old["functions"].items() if new["functions"].get(f) != prototype]
    return found


@pytest.mark.parametrize("released", RELEASED, ids=lambda p: p.stem)
def test_nothing_released_was_changed(released: Path) -> None:
    assert lost(json.loads(released.read_text()), render.dump(ABI)) == []


def test_a_released_abi_is_there() -> None:
    assert [p.stem for p in RELEASED][-1].split(".")[0] == str(ABI.major)


@pytest.mark.parametrize(
    ("section", "key", "change"),
    [
        ("enums", "kseal_dtype", {"KSEAL_DTYPE_BF16": 7}),
        ("structs", "kseal_open_args", None),
        ("functions", "kseal_open", "int kseal_open(void)"),
        ("functions", "kseal_close", None),
    ],
)
def test_a_changed_interface_is_noticed(section: str, key: str, change: Any) -> None:
    old, new = render.dump(ABI), render.dump(ABI)
    if change is None:
        del new[section][key]
    else:
        new[section][key] = change
    assert any(name.startswith(("KSEAL", "kseal_open", "kseal_close")) for name in lost(old, new))


def test_no_op_is_named_outside_what_is_generated() -> None:
    named = []
    for path in sorted((ROOT / "abi").rglob("*")):
        relative = path.relative_to(ROOT / "abi").as_posix()
        if (
            path.is_dir()
            or relative.startswith(("generated/", "released/", "examples/"))
            or "__pycache__" in relative
        ):
            continue
        named += [f"{relative}: {op.name}" for op in ABI.ops if op.name in path.read_text()]
    assert named == []


def test_the_header_documents_every_field_and_function() -> None:
    lines = library.header().read_text().splitlines()
    undocumented = [
        line
        for before, line in itertools.pairwise(lines)
        if re.match(r"    \w[^()]*;$|KSEAL_API ", line) and not before.rstrip().endswith("*/")
    ]
    assert undocumented == []
    assert library.header().read_text().count("Threads: ") == len(ABI.all_functions)


@pytest.mark.skipif(compiler("gcc", "clang") is None, reason="no gcc or clang on this machine")
@pytest.mark.parametrize("source", library.core_sources(), ids=lambda p: p.name)
def test_sources_are_clean_under_another_compiler(tmp_path: Path, source: Path) -> None:
    found = compiler("gcc", "clang")
    assert found is not None
    flags = [*STRICT, "-O2", "-c", "-fPIC", "-Wshadow", "-Wcast-qual", "-Wstrict-prototypes"]
    out = compile_c(
        [found], [source], tmp_path / "out.o", *flags, *(f"-I{d}" for d in library.include_dirs())
    )
    assert out.stat().st_size > 0
