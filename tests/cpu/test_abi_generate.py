"""What is generated is what the YAML says, what C compilers see, and a superset of every released ABI."""

from __future__ import annotations

import functools
import itertools
import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import cffi
import pytest
import yaml
from cpu.fake_driver.native import STRICT, ZIG, compile_c, compiler
from cpu.later_abi import append_everything, copy_of, edit

from kernseal.abi import generate, library, model, render
from kernseal.abi.compatibility import broken
from kernseal.loader import errors

ROOT = Path(__file__).resolve().parents[2]
ABI = model.load()
GENERATED = [*generate.TEMPLATES, "abi/generated/abi.json", "abi/generated/kernseal_ffi.py"]
DECLARATIONS = (
    *("abi/generated/kernseal.h", "abi/generated/kernseal_cdef.h", "abi/generated/kernseal_ffi.py"),
    *("abi/rust/src/sys.rs", "abi/generated/abi.json", "docs/abi.md"),
)
RELEASED = sorted((ROOT / "abi" / "released").glob("*.json"))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return copy_of(tmp_path)


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
    added = '    - {name: added, type: u64, since: "1.1", doc: "New."}\n'
    edit(copy / "kernels" / "gdn_prefill" / "kernel.yaml", stream, stream + added)
    assert generate.main(["--check", "--root", str(copy)]) == 1
    named = {line.split(":")[0] for line in capsys.readouterr().err.splitlines()}
    assert named == {*DECLARATIONS, "abi/released/1.0.json"}
    args = model.load(copy / "abi", copy / "kernels").op("gdn_prefill").args
    before = ABI.op("gdn_prefill").args
    assert (args.size, args.min_size) == (before.size + 8, before.size), "callers of 1.0 stay welcome"


def test_a_field_in_the_padding_of_a_release_is_refused(copy: Path) -> None:
    yaml_path = copy / "kernels" / "gdn_prefill" / "kernel.yaml"
    stream = '    - {name: stream, type: stream, doc: "CUstream to launch on; null is the legacy default stream."}\n'
    edit(yaml_path, stream, stream + '    - {name: last, type: u32, doc: "Ends in padding."}\n')
    model.load(copy / "abi", copy / "kernels")
    edit(yaml_path, "Ends in padding", 'E."}\n    - {name: added, type: u32, since: "1.1", doc: "N')
    with pytest.raises(ValueError, match=r"kseal_gdn_prefill_args\.added: lies in the padding that ends"):
        model.load(copy / "abi", copy / "kernels")


def test_an_axis_that_came_later_means_something_for_callers_before_it(copy: Path) -> None:
    yaml_path = copy / "kernels" / "gdn_prefill" / "kernel.yaml"
    for axis in ("beta", "checkpoints"):
        edit(yaml_path, f"axis: {axis}}}", f'axis: {axis}, since: "1.1"}}')
    edit(yaml_path, '    - {name: stream, type: stream, doc: "Stream that runs', "    #")
    model.load(copy / "abi", copy / "kernels")
    edit(yaml_path, "axis: index_dtype}", 'axis: index_dtype, since: "1.1"}')
    with pytest.raises(ValueError, match="axis index_dtype came later; callers before it pass 0, which it"):
        model.load(copy / "abi", copy / "kernels")


def test_a_config_has_its_axes_in_their_order(copy: Path) -> None:
    alpha, beta = (f"    - {{name: {name}, axis: {name}}}\n" for name in ("alpha", "beta"))
    edit(copy / "kernels" / "gdn_prefill" / "kernel.yaml", alpha + beta, beta + alpha)
    with pytest.raises(ValueError, match="gdn_prefill: config has its axes in another order"):
        model.load(copy / "abi", copy / "kernels")


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
    text = (ROOT / "abi" / "rust" / "src" / "sys.rs").read_text()
    dump = render.dump(ABI)
    names = [*dump["functions"], *dump["structs"], *(c for values in dump["enums"].values() for c in values)]
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


def test_statuses_are_the_exceptions() -> None:
    described = yaml.safe_load((ROOT / "abi" / "status.yaml").read_text())["statuses"]
    exceptions = {e.value: (e.status, e.exit_code, e.__doc__) for e in errors.BY_VALUE.values()}
    assert exceptions == {
        s["value"]: (s["name"], s["exit"], s["doc"]) for s in described if s["name"] != "ok"
    }


RELEASES = [json.loads(path.read_text()) for path in RELEASED]


@pytest.mark.parametrize("released", RELEASES, ids=[path.stem for path in RELEASED])
def test_nothing_released_was_changed(released: dict[str, Any]) -> None:
    assert broken(released, render.dump(ABI)) == []


def test_a_released_abi_is_there() -> None:
    assert [p.stem for p in RELEASED][-1].split(".")[0] == str(ABI.major)


def changed(path: str, value: Any = None) -> dict[str, Any]:
    """The ABI with one entry set, or gone."""
    made = deepcopy(render.dump(ABI))
    *folders, name = path.split("/")
    at = functools.reduce(lambda found, folder: found[folder], folders, made)
    if value is None:
        del at[name]
    else:
        at[name] = value
    return made


def reordered(struct: str) -> dict[str, Any]:
    """The ABI with the last two fields of a struct swapped."""
    made = changed("abi/minor", 1)
    fields = made["structs"][struct]["fields"]
    *_, one, other = fields
    fields[one], fields[other] = fields[other], fields[one]
    return made


OPEN = "structs/kseal_open_args"
U32_AT = {"type": "uint32_t", "size": 4}


@pytest.mark.parametrize(
    ("new", "problem"),
    [
        (changed("enums/kseal_dtype/KSEAL_DTYPE_BF16"), "kseal_dtype.KSEAL_DTYPE_BF16: was 1, is gone"),
        (changed("enums/kseal_dtype/KSEAL_DTYPE_BF16", 9), "kseal_dtype.KSEAL_DTYPE_BF16: was 1, is 9"),
        (changed("enums/kseal_evidence"), "kseal_evidence.KSEAL_EVIDENCE_INSPECTED: was 1, is gone"),
        (changed(OPEN), "kseal_open_args: gone"),
        (changed(f"{OPEN}/fields/flags"), "kseal_open_args.flags: was {"),
        (changed(f"{OPEN}/fields/flags", {**U32_AT, "offset": 12}), "'offset': 12"),
        (changed(f"{OPEN}/min_size", 32), "kseal_open_args: took callers from 24 bytes, takes them from 32"),
        (
            changed(f"{OPEN}/fields/hole", {**U32_AT, "offset": 12}),
            "kseal_open_args.hole: lies within the 24",
        ),
        (reordered("kseal_open_args"), "kseal_open_args.bundle_path: was {"),
        (reordered("kseal_xqa_decode_args"), "kseal_xqa_decode_args.stream: was {"),
        (
            changed("functions/kseal_close"),
            "kseal_close: was `void kseal_close(kseal_bundle *bundle)`, is `gone`",
        ),
        (changed("functions/kseal_open", "int kseal_open(void)"), "is `int kseal_open(void)`"),
        (changed("abi/major", 2), "abi: was 1.0, is 2.0; a successor has the same major"),
        (changed("functions/kseal_more", "void kseal_more(void)"), "has kseal_more besides; raise minor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_break_a_released_caller_is_named(new: dict[str, Any], problem: str) -> None:
    assert [text for text in broken(render.dump(ABI), new) if problem in text]


def test_a_lower_minor_is_no_successor() -> None:
    assert broken(changed("abi/minor", 1), render.dump(ABI)) == [
        "abi: was 1.1, is 1.0; a successor has the same major and no lower minor"
    ]


def test_additions_under_a_new_minor_break_nobody(copy: Path) -> None:
    append_everything(copy)
    generate.main(["--root", str(copy)])
    assert generate.main(["--check", "--root", str(copy)]) == 0
    assert "\nstruct Later {" in (copy / "abi" / "generated" / "kernseal.hpp").read_text()
    assert "impl crate::Op for Later {" in (copy / "abi" / "rust" / "src" / "sys.rs").read_text()
    now = render.dump(model.load(copy / "abi", copy / "kernels"))
    assert now["enums"]["kseal_dtype"]["KSEAL_DTYPE_E5M2"] == 99
    assert {"kseal_more", "kseal_later_run"} <= now["functions"].keys()
    assert all("added" in struct["fields"] for struct in now["structs"].values())
    assert broken(render.dump(ABI), now) == []


def test_the_generator_tells_of_a_broken_release(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(copy / "abi" / "types.yaml", "name: f16,  value: 2", "name: f16,  value: 20")
    assert generate.main(["--root", str(copy)]) == 0
    assert generate.main(["--check", "--root", str(copy)]) == 1
    told = capsys.readouterr().err
    assert told == "abi/released/1.0.json: kseal_dtype.KSEAL_DTYPE_F16: was 2, is 20\n"


def test_no_op_is_named_outside_what_is_generated() -> None:
    named = []
    for path in sorted((ROOT / "abi").rglob("*")):
        relative = path.relative_to(ROOT / "abi").as_posix()
        if (
            path.is_dir()
            or relative.startswith(("generated/", "released/", "examples/", "rust/examples/", "rust/target/"))
            or relative == "rust/src/sys.rs"
            or "__pycache__" in relative
        ):
            continue
        # What documents the crate shows an op.
        text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("//!"))
        named += [
            f"{relative}: {op.name}" for op in ABI.ops if op.name in text or render.pascal(op.name) in text
        ]
    assert named == []


def test_the_header_documents_every_field_and_function() -> None:
    lines = library.header().read_text().splitlines()
    undocumented = [
        line
        for before, line in itertools.pairwise(lines)
        if re.match(r"    \w[^()]*;$|KSEAL_API ", line) and not before.rstrip().endswith("*/")
    ]
    assert undocumented == []
    for rule in ("Lifetimes", "Threads", "Streams", "Errors"):
        assert library.header().read_text().count(f" * {rule}: ") == len(ABI.all_functions), rule


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
