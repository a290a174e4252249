"""Structs of every size, and callers and libraries of two releases: each pair works or gets a defined answer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cffi
import pytest
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.native import STRICT, ZIG, compile_c
from cpu.later_abi import ROOT, append_fields, copy_of, regenerate
from cpu.test_abi_c import C, records

from kernseal.abi import library, model
from kernseal.abi.library import MAX_KERNELS, KernelRecord, VariantRecord
from kernseal.export import spec
from kernseal.loader import library as loader_library
from kernseal.loader.errors import AbiMismatch

ABI = model.load()
STRUCTS = [struct.name for struct in ABI.all_structs]
STRUCT_END = 4096


def made_up(op: spec.Op) -> VariantRecord:
    """The variant at the op's defaults, of a class of whatever SM, with kernels that nobody launches here."""
    image = f"image of {op.name}, long enough to read".encode()
    axes = op.data["defaults"]
    sm = next(
        cls["sms"][0] for cls in op.data["classes"].values() if op.class_for(spec.Target(cls["sms"][0]), axes)
    )
    variant = op.variant(spec.Target(sm), axes)
    kernels = tuple(KernelRecord(f"kernel{i}", 0, 0, 0, 0) for i in range(MAX_KERNELS))
    digest = hashlib.sha256(image).hexdigest()
    file = f"cubin/{variant.key}.cubin"
    return VariantRecord(
        op.name,
        variant.id,
        variant.class_name,
        dict(axes),
        kernels,
        file,
        len(image),
        digest,
        "inspected",
        None,
        None,
    )


OTHERS = {op.name: made_up(op) for op in spec.load_ops() if op.name != "gdn_prefill"}


def build(root: Path, folder: Path) -> Path:
    """libkernseal.so of the sources in ``root``, with the stubs' variants and one of each other op, beside their images."""
    variants = [*records(), *OTHERS.values()]
    sources = library.library_sources("sm_90a", None, variants, folder)
    sources = [root / path.relative_to(ROOT) if path.is_relative_to(ROOT) else path for path in sources]
    includes = [root / path.relative_to(ROOT) for path in library.include_dirs()]
    for variant in variants:
        image = folder / variant.file
        image.parent.mkdir(parents=True, exist_ok=True)
        name = variant.op if variant in OTHERS.values() else variant.variant
        image.write_bytes(f"image of {name}, long enough to read".encode())
        assert hashlib.sha256(image.read_bytes()).hexdigest() == variant.sha256
    flags = [*STRICT, "-O1", "-fPIC", "-shared", "-fvisibility=hidden", *(f"-I{d}" for d in (*includes, C))]
    return compile_c(ZIG, [*sources, C / "stub_host.c"], folder / "libkernseal.so", *flags)


class Caller:
    """A program that was built with one release's header and uses a library of one release."""

    def __init__(self, cdef: str, library_path: Path) -> None:
        self.ffi: Any = cffi.FFI()
        self.ffi.cdef(cdef)
        self.c: Any = self.ffi.dlopen(str(library_path))
        self.version = int(self.c.KSEAL_ABI_VERSION)
        self.folder = self.ffi.new("char[]", str(library_path.parent).encode())
        self.kept: list[Any] = []

    def struct(self, name: str, extra: int = 0, **fields: Any) -> Any:
        """A struct with ``extra`` zero bytes after it, as a larger one of a later release would have them."""
        size = self.ffi.sizeof(name)
        memory = self.ffi.new("uint64_t[]", (size + extra + 7) // 8)
        self.kept.append(memory)
        made = self.ffi.cast(f"{name} *", memory)
        for field, value in {"struct_size": size + extra, **fields}.items():
            setattr(made, field, value)
        return made

    def bytes_of(self, made: Any, size: int) -> Any:
        return self.ffi.buffer(made, size)

    def open_args(self, extra: int = 0) -> Any:
        return self.struct("kseal_open_args", extra, abi_version=self.version, bundle_path=self.folder)

    def config(self, op: str, extra: int = 0) -> Any:
        axes = OTHERS[op].axes if op in OTHERS else records()[0].axes
        values = {a.name: a.values[model.axis_key(axes[a.name])] for a in ABI.op(op).axes}
        return self.struct(f"kseal_{op}_config", extra, device=0, **values)

    def args(self, op: str, extra: int = 0) -> Any:
        """No sequences: a run that succeeds and launches nothing."""
        return self.struct(f"kseal_{op}_args", extra)

    def open(self, args: Any = None) -> tuple[int, Any]:
        out = self.ffi.new("kseal_bundle **")
        return int(self.c.kseal_open(args or self.open_args(), out)), out[0]

    def prepare(self, op: str, bundle: Any, config: Any = None) -> tuple[int, Any]:
        out = self.ffi.new(f"kseal_{op} **")
        return int(getattr(self.c, f"kseal_{op}_prepare")(bundle, config or self.config(op), out)), out[0]

    def error(self) -> str:
        text = self.ffi.string(self.c.kseal_last_error())
        assert isinstance(text, bytes)
        return text.decode()


Call = Callable[[Any], int]


def calls(caller: Caller, name: str) -> tuple[Callable[[int], Any], list[Call]]:
    """How to make a struct with so many bytes after it, and every function that takes it."""
    _, bundle = caller.open()
    if name == "kseal_open_args":
        return caller.open_args, [lambda made: caller.open(made)[0]]
    if name == "kseal_variant_info":
        return (
            lambda extra: caller.struct(name, extra),
            [lambda made: int(caller.c.kseal_variant_at(bundle, 0, made))],
        )
    op = name.removeprefix("kseal_").rpartition("_")[0]
    if name.endswith("_config"):
        return lambda extra: caller.config(op, extra), [lambda made: caller.prepare(op, bundle, made)[0]]
    status, handle = caller.prepare(op, bundle)
    assert status == 0, caller.error()
    sized = [f"kseal_{op}_{what}_size" for what in ABI.op(op).scratch]
    size = caller.ffi.new("uint64_t *")
    return (
        lambda extra: caller.args(op, extra),
        [
            lambda made: int(getattr(caller.c, f"kseal_{op}_run")(handle, made)),
            *(lambda made, f=f: int(getattr(caller.c, f)(handle, made, size)) for f in sized),
        ],
    )


@pytest.fixture(scope="module")
def now(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("now"))


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The library and the declarations of 1.1."""
    root = copy_of(tmp_path_factory.mktemp("root"))
    append_fields(root)
    regenerate(root)
    cdef = (root / "abi" / "generated" / "kernseal_cdef.h").read_text()
    return build(root, tmp_path_factory.mktemp("later")), cdef


@pytest.fixture
def caller(now: Path, gpu: FakeGpu) -> Iterator[Caller]:
    yield Caller(library.cdef(), now)


@pytest.mark.parametrize("name", STRUCTS)
def test_every_smaller_size_is_refused(caller: Caller, name: str) -> None:
    make, functions = calls(caller, name)
    made = make(0)
    needed = caller.ffi.sizeof(name)
    for call in functions:
        for size in range(needed):
            made.struct_size = size
            assert call(made) == caller.c.KSEAL_ABI_MISMATCH
            assert caller.error() == f"{name}.struct_size is {size}; at least {needed} is needed"


@pytest.mark.parametrize("name", STRUCTS)
def test_a_larger_struct_is_taken_while_what_this_library_lacks_is_zero(caller: Caller, name: str) -> None:
    make, functions = calls(caller, name)
    for extra in (0, 1, 4, 8, 100, STRUCT_END - caller.ffi.sizeof(name)):
        for call in functions:
            assert call(make(extra)) == 0, caller.error()


@pytest.mark.parametrize("name", [name for name in STRUCTS if name != "kseal_variant_info"])
def test_a_field_that_this_library_lacks_is_refused(caller: Caller, name: str) -> None:
    make, functions = calls(caller, name)
    known = caller.ffi.sizeof(name)
    for at in (0, 3, 8, 39):
        made = make(40)
        caller.bytes_of(made, known + 40)[known + at] = b"\1"
        for call in functions:
            assert call(made) == caller.c.KSEAL_ABI_MISMATCH
            assert caller.error() == (
                f"{name}.struct_size is {known + 40}, newer than this library, which knows {known} bytes; "
                f"byte {known + at} is set and must be 0"
            )


@pytest.mark.parametrize("size", [STRUCT_END + 1, 1 << 31, (1 << 32) - 1])
@pytest.mark.parametrize("name", STRUCTS)
def test_a_size_that_was_never_set_is_refused_before_so_much_is_read(
    caller: Caller, name: str, size: int
) -> None:
    make, functions = calls(caller, name)
    made = make(0)
    made.struct_size = size
    for call in functions:
        assert call(made) == caller.c.KSEAL_ABI_MISMATCH
        assert caller.error() == f"{name}.struct_size is {size}; up to {STRUCT_END} are supported"


def test_a_later_callers_variant_has_zeros_where_this_library_knows_nothing(caller: Caller) -> None:
    _, bundle = caller.open()
    size = caller.ffi.sizeof("kseal_variant_info")
    info = caller.struct("kseal_variant_info", 16)
    caller.bytes_of(info, size + 16)[size:] = b"\xff" * 16
    assert caller.c.kseal_variant_at(bundle, 0, info) == 0
    assert bytes(caller.bytes_of(info, size + 16)[size:]) == bytes(16)
    first = min(variant.op for variant in (*records(), *OTHERS.values()))
    assert info.struct_size == size + 16 and caller.ffi.string(info.op) == first.encode()


# ---- a caller of 1.0 with a library of 1.1 ----


@pytest.fixture
def older(later: tuple[Path, str], gpu: FakeGpu) -> Caller:
    return Caller(library.cdef(), later[0])


@pytest.mark.parametrize("name", STRUCTS)
def test_an_older_caller_works_with_a_newer_library(older: Caller, name: str) -> None:
    assert older.c.kseal_abi_version() == older.version + 1
    make, functions = calls(older, name)
    for call in functions:
        assert call(make(0)) == 0, older.error()


@pytest.mark.parametrize("name", STRUCTS)
def test_a_newer_library_asks_no_more_than_the_first_release(older: Caller, name: str) -> None:
    make, functions = calls(older, name)
    made = make(0)
    made.struct_size = older.ffi.sizeof(name) - 1
    for call in functions:
        assert call(made) == older.c.KSEAL_ABI_MISMATCH
        assert f"at least {older.ffi.sizeof(name)} is needed" in older.error()


def test_a_newer_library_writes_no_more_than_an_older_caller_has_room_for(older: Caller) -> None:
    _, bundle = older.open()
    size = older.ffi.sizeof("kseal_variant_info")
    info = older.struct("kseal_variant_info", 16, struct_size=size)
    older.bytes_of(info, size + 16)[size:] = b"\xee" * 16
    assert older.c.kseal_variant_at(bundle, 0, info) == 0
    assert bytes(older.bytes_of(info, size + 16)[size:]) == b"\xee" * 16


# ---- a caller of 1.1 with a library of 1.0 ----


@pytest.fixture
def newer(now: Path, later: tuple[Path, str], gpu: FakeGpu) -> Caller:
    return Caller(later[1], now)


def test_a_newer_caller_is_told_at_open(newer: Caller) -> None:
    status, bundle = newer.open()
    assert status == newer.c.KSEAL_ABI_MISMATCH and bundle == newer.ffi.NULL
    assert newer.error() == "abi_version is 1.1; this library has 1.0"


@pytest.mark.parametrize("name", STRUCTS)
def test_a_newer_caller_that_asks_for_no_more_than_the_library_has_is_served(
    newer: Caller, name: str
) -> None:
    newer.version -= 1
    make, functions = calls(newer, name)
    for call in functions:
        assert call(make(0)) == 0, newer.error()
        if name == "kseal_variant_info":
            continue
        made = make(0)
        made.added = 1
        assert call(made) == newer.c.KSEAL_ABI_MISMATCH
        assert f"{name}.struct_size is {newer.ffi.sizeof(name)}, newer than this library" in newer.error()


# ---- Python's loader ----


def test_the_loader_takes_a_newer_library(later: tuple[Path, str], gpu: FakeGpu) -> None:
    assert loader_library.Library(str(later[0])).c.kseal_abi_version() == ABI.version + 1


def test_a_newer_loader_refuses_an_older_library(
    now: Path, later: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ffi = cffi.FFI()
    ffi.cdef(later[1])
    monkeypatch.setattr(loader_library, "declarations", lambda: ffi)
    with pytest.raises(AbiMismatch, match=r"libkernseal\.so has ABI 1\.0, this loader needs 1\.1"):
        loader_library.Library(str(now))
