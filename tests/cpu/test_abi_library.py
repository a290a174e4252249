"""The library as a file: what it exports and imports, what it refuses to be built of, and how it is found and opened."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cffi
import pytest
from cpu.fake_driver.native import ZIG, build_fake_driver, compile_c
from cpu.test_abi_c import DRIVER, STRICT, STUB, C, records, run_test
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from hypothesis import given
from hypothesis import strategies as st

from kernseal.abi import library, model
from kernseal.abi.library import VariantRecord, library_sources
from kernseal.abi.pins import pins_header, pins_rust

TARGET = ("-target", "x86_64-linux-gnu.2.17")
ABI = model.load()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """libkernseal.so of stubs, linked much as the exporter links it."""
    folder = tmp_path_factory.mktemp("shared")
    sources = library_sources("sm_90a", None, records(), folder)
    flags = [*TARGET, *STRICT, "-O2", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{C}"]
    flags += [f"-I{d}" for d in library.include_dirs()]
    flags.append(f"-Wl,--version-script,{library.version_script()}")
    return compile_c(ZIG, [*sources, C / "stub_host.c"], folder / "libkernseal.so", *flags)


@pytest.fixture(scope="module", params=["stubs", pytest.param("bundle", marks=pytest.mark.slow)])
def linked(request: pytest.FixtureRequest) -> Path:
    """The library of stubs, and that of a bundle that was built as any other."""
    if request.param == "stubs":
        stubs: Path = request.getfixturevalue("shared")
        return stubs
    built: Path = request.getfixturevalue("example_bundle")
    return built / "libkernseal.so"


def test_only_the_functions_of_the_header_are_exported(linked: Path) -> None:
    with linked.open("rb") as file:
        symbols = ELFFile(file).get_section_by_name(".dynsym")
        exported = {s.name for s in symbols.iter_symbols() if s["st_shndx"] != "SHN_UNDEF" and s.name}
    assert exported == {f.name for f in ABI.all_functions}


def test_only_libc_and_libdl_of_glibc_2_17_are_needed(linked: Path) -> None:
    with linked.open("rb") as file:
        elf = ELFFile(file)
        needed = {tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")}
        versions = [
            aux.name
            for section in elf.iter_sections()
            if isinstance(section, GNUVerNeedSection)
            for _, auxes in section.iter_versions()
            for aux in auxes
        ]
    # The dynamic linker itself has thread-local storage.
    assert needed == {"libc.so.6", "libdl.so.2", "ld-linux-x86-64.so.2"}
    numbers = [tuple(int(n) for n in v.removeprefix("GLIBC_").split(".")) for v in versions]
    assert numbers
    assert max(numbers) <= (2, 17)


def test_nothing_that_prints_or_aborts_is_imported(linked: Path) -> None:
    with linked.open("rb") as file:
        symbols = ELFFile(file).get_section_by_name(".dynsym")
        imported = {s.name for s in symbols.iter_symbols() if s["st_shndx"] == "SHN_UNDEF" and s.name}
    assert imported.isdisjoint(
        {"printf", "fprintf", "puts", "fputs", "abort", "exit", "stderr", "stdout", "__assert_fail"}
    )
    assert "vsnprintf" in imported


@pytest.mark.parametrize("call", ["malloc", "calloc", "realloc", "free", "pthread_mutex_lock"])
def test_launch_code_does_not_allocate_or_lock(call: str) -> None:
    launch = [p for p in library.core_sources() if p.name == "launch.c"]
    core = [library.include_dirs()[0] / name for name in ("check.c", "cute.c")]
    assert launch
    assert [p for p in [*launch, *core] if call in p.read_text()] == []


def record(**changes: object) -> VariantRecord:
    return replace(records()[0], **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op": "other"}, "no op 'other'"),
        ({"class_name": "sm80"}, "class_name 'sm80' is not one of sm90, sm120, sm100"),
        ({"evidence": "hearsay"}, "kseal_evidence has no value 'hearsay'"),
        ({"axes": {"dtype": "bf16"}}, "axes"),
        ({"axes": {**records()[0].axes, "dtype": "f8"}}, "f8"),
        ({"sha256": "ABC"}, "sha256 'ABC' is not 64 lowercase hex digits"),
        ({"kernels": (replace(STUB, entry='x"; system("'),)}, "kernels.0.entry"),
        ({"file": "a\\b"}, "file"),
        ({"variant": "new\nline"}, "variant"),
        ({"host_prefix": "a b"}, "host_prefix 'a b' is not a symbol"),
        ({"host_function": ""}, "host_function '' is not a symbol"),
    ],
)
def test_a_record_that_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=r"^(gdn_prefill|other)/") as caught:
        library_sources("sm_90a", None, [record(**changes)], tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("second", "what"),
    [({}, "variant"), ({"variant": "b"}, "host_prefix"), ({"variant": "b", "host_prefix": "b"}, "config")],
)
def test_what_must_be_unique_is(tmp_path: Path, second: dict[str, object], what: str) -> None:
    with pytest.raises(ValueError, match=f"{what} given twice"):
        library_sources("sm_90a", None, [record(), record(**second)], tmp_path)


def test_the_order_of_the_records_changes_nothing(tmp_path: Path) -> None:
    first = library_sources("sm_90a", None, records(), tmp_path / "a")
    second = library_sources("sm_90a", None, records()[::-1], tmp_path / "b")
    assert first[-1].read_bytes() == second[-1].read_bytes()
    assert first[:-1] == second[:-1]
    assert [p.name for p in first].count("launch.c") == len(ABI.ops)


@pytest.mark.parametrize("name", ["90", "sm90", "sm_", "sm_90x", "compute_90", "sm_1000"])
def test_an_sm_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is not an SM"):
        library_sources(name, None, records(), tmp_path)


@pytest.mark.parametrize(
    ("name", "cc"), [("sm_90a", (9, 0)), ("sm_103a", (10, 3)), ("sm_121a", (12, 1)), ("sm_89", (8, 9))]
)
def test_an_sm_is_a_compute_capability(name: str, cc: tuple[int, int]) -> None:
    assert library.compute_capability(name) == cc


@given(st.binary(max_size=300))
def test_sha256_is_sha256(sha256: Callable[[bytes], str], data: bytes) -> None:
    assert sha256(data) == hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="module")
def sha256(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bytes], str]:
    core = library.include_dirs()[0]
    out = compile_c(
        ZIG, [core / "sha256.c"], tmp_path_factory.mktemp("sha") / "sha256.so", *STRICT, "-shared", "-fPIC"
    )
    ffi = cffi.FFI()
    ffi.cdef("void kseal_sha256_hex(const void *data, size_t size, char *hex);")
    c = ffi.dlopen(str(out))

    def digest(data: bytes) -> str:
        hex_ = ffi.new("char[65]")
        c.kseal_sha256_hex(ffi.from_buffer(data), len(data), hex_)  # type: ignore[attr-defined]
        return bytes(ffi.buffer(hex_, 64)).decode()

    return digest


# ---- the driver and validation bundles: each in a process of its own ----

OPEN = """
import sys
from pathlib import Path
import cffi
from kernseal.abi import library
ffi = cffi.FFI()
ffi.cdef(library.cdef())
c = ffi.dlopen(sys.argv[1])
path = ffi.new("char[]", str(Path(sys.argv[1]).parent).encode())
out = ffi.new("kseal_bundle **")
args = {"struct_size": ffi.sizeof("kseal_open_args"), "abi_version": c.KSEAL_ABI_VERSION,
        "flags": int(sys.argv[2]), "bundle_path": path}
status = c.kseal_open(ffi.new("kseal_open_args *", args), out)
print(ffi.string(c.kseal_status_name(status)).decode(), ffi.string(c.kseal_last_error()).decode())
"""


def open_in_another_process(library_path: Path, driver_folder: Path, flags: int = 0) -> str:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver_folder)}
    command = [sys.executable, "-c", OPEN, str(library_path), str(flags)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_driver_that_is_there_is_found_by_its_name(shared: Path, tmp_path: Path) -> None:
    build_fake_driver(tmp_path)
    assert open_in_another_process(shared, tmp_path).startswith("ok")


def test_no_driver_is_told(shared: Path, tmp_path: Path) -> None:
    # What this machine may have is put out of reach by a file that is no library.
    (tmp_path / "libcuda.so.1").write_bytes(b"")
    assert open_in_another_process(shared, tmp_path).startswith("no_driver ")


def test_a_driver_that_lacks_a_function_is_told_by_its_name(shared: Path, tmp_path: Path) -> None:
    build_fake_driver(tmp_path, ZIG, "-DFAKE_OMIT_UNLOAD")
    told = open_in_another_process(shared, tmp_path)
    assert told.startswith("no_driver ")
    assert "cuLibraryUnload" in told


@pytest.fixture(scope="module")
def retargeted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("retargeted")
    sources = library_sources("sm_120a", "sm_90a", records(), folder)
    flags = [
        *STRICT,
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        f"-I{C}",
        *(f"-I{d}" for d in library.include_dirs()),
    ]
    return compile_c(ZIG, [*sources, C / "stub_host.c"], folder / "libkernseal.so", *flags)


def test_kernels_rebuilt_for_another_sm_open_for_validation_only(retargeted: Path, tmp_path: Path) -> None:
    build_fake_driver(tmp_path)
    told = open_in_another_process(retargeted, tmp_path)
    assert told.startswith("wrong_sm ")
    assert "sm_120a rebuilt for sm_90a" in told
    assert "KSEAL_OPEN_FLAG_VALIDATION" in told
    assert open_in_another_process(retargeted, tmp_path, flags=1).startswith("ok")


def test_a_retargeted_library_runs_on_what_it_was_rebuilt_for(tmp_path: Path) -> None:
    driver = build_fake_driver(tmp_path)
    sources = library_sources("sm_120a", "sm_90a", records(), tmp_path)
    (tmp_path / "test.c").write_text(
        '#define _GNU_SOURCE\n#include "fixture.h"\n'
        "TEST(runs) {\n"
        "    make_bundle();\n"
        "    kseal_bundle *bundle;\n"
        "    kseal_open_args a = open_args();\n"
        "    a.flags = KSEAL_OPEN_FLAG_VALIDATION;\n"
        "    CHECK(kseal_open(&a, &bundle) == KSEAL_OK);\n"
        '    args_t args = args_of("packed");\n'
        '    CHECK(kseal_gdn_prefill_run(prepare(bundle, "packed"), &args) == KSEAL_OK);\n'
        '    config_t c = config_of("packed");\n'
        "    kseal_gdn_prefill *handle;\n"
        "    fake_set_device(1, 12, 0, 188);\n"
        '    REFUSES(KSEAL_WRONG_SM, kseal_gdn_prefill_prepare(bundle, &c, &handle), "sm_120", "sm_90a");\n'
        "}\n"
    )
    includes = [f"-I{d}" for d in (*library.include_dirs(), C, DRIVER)]
    inputs = [tmp_path / "test.c", C / "stub_host.c", *sources, driver]
    program = compile_c(ZIG, inputs, tmp_path / "program", *STRICT, *includes, f"-Wl,-rpath,{tmp_path}")
    run_test(program, "runs", tmp_path)


# ---- pins ----

FILES = {"libkernseal.so": "a" * 64, "cubin/op/v.cubin": "0" * 64, "kernseal.h": "b" * 64}


def test_pins_are_constants_of_c_and_rust() -> None:
    text = pins_header("sm_90a", FILES)
    assert f'#define KSEAL_PINS_LIBRARY_SHA256 "{"a" * 64}"' in text
    assert f"#define KSEAL_PINS_ABI_VERSION {ABI.version}u" in text
    assert '#define KSEAL_PINS_SM "sm_90a"' in text
    order = [text.index(path) for path in ("cubin/op/v.cubin", "kernseal.h", "libkernseal.so", "#endif")]
    assert order[0] < order[1] < order[-1]
    rust = pins_rust("sm_90a", FILES)
    assert f'pub const LIBRARY_SHA256: &str = "{"a" * 64}";' in rust
    assert rust.count("    (") == len(FILES)
    assert pins_rust("sm_90a", dict(reversed(FILES.items()))) == rust


def test_pins_compile(tmp_path: Path) -> None:
    (tmp_path / "kernseal_pins.h").write_text(pins_header("sm_90a", FILES))
    (tmp_path / "main.c").write_text(
        '#include "kernseal_pins.h"\n'
        "static const struct { const char *path, *sha256; } pins[] = {KSEAL_PINS_FILES};\n"
        "int main(void) { return sizeof pins / sizeof *pins == 3 && pins[2].path[0] == 'l' ? 0 : 1; }\n"
    )
    program = compile_c(ZIG, [tmp_path / "main.c"], tmp_path / "program", *STRICT)
    assert subprocess.run([str(program)], check=False).returncode == 0


@pytest.mark.parametrize("write", [pins_header, pins_rust])
def test_pins_that_are_none_are_refused(write: Callable[..., str]) -> None:
    with pytest.raises(ValueError, match=r"kernseal\.h: sha256 'x'"):
        write("sm_90a", {**FILES, "kernseal.h": "x"})
    with pytest.raises(ValueError, match=r"libkernseal\.so is not there"):
        write("sm_90a", {"kernseal.h": "b" * 64})
