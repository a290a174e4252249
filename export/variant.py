"""Builds one variant into the cache: compile, PTX rules, assemble, inspect. The cache key covers every input."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kernseal.abi.library import KernelRecord
from kernseal.export import assemble, cache, elf, files, front_end, limits, ptx
from kernseal.export.assemble import Assembled
from kernseal.export.front_end import Compiled, Tools
from kernseal.export.inputs import VariantInputs
from kernseal.export.ptx import PtxRule
from kernseal.export.spec import Op, Target, Variant
from kernseal.loader.errors import BuildFailed

ALLOWED_IMPORTS = ("_GLOBAL_OFFSET_TABLE_", "cuda_dialect_assert_success")


@dataclass(frozen=True)
class Built:
    """One variant in the cache.

    Attributes:
        folder: holds ``raw.ptx`` (as compiled), ``kernel.ptx`` (as assembled), ``kernel.cubin`` and, where the front
            end makes host code, ``host.o``.
        kernels: of the image, in the order of the front end.
        host_function: name of the host entry, or None where there is no ``host.o``.
        sha256: of each of these.
        rules: PTX rule to replacements made.
    """

    folder: Path
    kernels: tuple[KernelRecord, ...]
    host_function: str | None
    code_sha256: str
    sha256: Mapping[str, str]
    rules: Mapping[str, int]

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()


def cached(key: str) -> Built | None:
    """The cache's entry for ``key`` if it is there and its files are the ones it was made with."""
    folder = cache.folder_of(key)
    try:
        record = json.loads((folder / "record.json").read_text())
        kernels = tuple(KernelRecord(**kernel) for kernel in record.pop("kernels"))
        built = Built(folder=folder, kernels=kernels, **record)
        for name, digest in built.sha256.items():
            if files.sha256_file(folder / name) != digest:
                return None
    except (FileNotFoundError, json.JSONDecodeError, TypeError, KeyError):
        return None
    cache.note_use(folder)
    return built


def files_of(built: Built) -> dict[str, bytes]:
    """Every file of the cache's entry."""
    return {name: built.read(name) for name in ("record.json", *built.sha256)}


def store(label: str, key: str, contents: Mapping[str, bytes]) -> Built:
    """Put an entry that was made elsewhere into the cache.

    Raises:
        BuildFailed: its files are not the ones its record names.
    """
    with _entry(key) as stage:
        for name, data in contents.items():
            (stage / Path(name).name).write_bytes(data)
    return _stored(label, key)


def _stored(label: str, key: str) -> Built:
    found = cached(key)
    if found is None:
        raise BuildFailed(f"{label}: the cache at {cache.folder_of(key)} does not hold what was just written")
    return found


def build(
    op: Op,
    variant: Variant,
    target: Target,
    inputs: VariantInputs,
    tree: Path,
    rules: Sequence[PtxRule],
    tools: Tools,
) -> Built:
    """Build one variant and put it into the cache.

    Raises:
        BuildFailed: a compiler failed, or what it made is not what the rest of the build relies on.
        RuleFailed: a PTX rule's count differs.
    """
    with _entry(inputs.key) as stage, _work_folder() as work:
        compiled = front_end.compile_variant(op, variant, target, tree, tools, work)
        raw = (work / "raw.ptx").read_bytes()
        patched, counts = ptx.apply(raw.decode(), rules, variant, target)
        assembled = assemble.assemble(tools.ptxas, target.arch, patched.encode(), work)
        program = elf.read(assembled.cubin)
        if patched.encode() == raw and (work / "dsl.cubin").is_file():
            _same_code(variant, program, elf.read((work / "dsl.cubin").read_bytes()))
        kernels = _kernels(variant, compiled, assembled, program)
        for kernel in kernels:
            label = f"{variant.key} for {target.name}"
            limits.check(label, target.arch, patched, kernel.static_smem, kernel.dynamic_smem)
        contents = {"raw.ptx": raw, "kernel.ptx": patched.encode(), "kernel.cubin": assembled.cubin}
        if compiled.host_function is not None:
            contents["host.o"] = (work / "host.o").read_bytes()
            _check_host(variant, contents["host.o"])
        record = Built(
            folder=Path(),
            kernels=kernels,
            host_function=compiled.host_function,
            code_sha256=program.code_sha256,
            sha256={name: files.sha256_bytes(data) for name, data in contents.items()},
            rules=counts,
        )
        for name, data in contents.items():
            (stage / name).write_bytes(data)
        fields = {name: value for name, value in asdict(record).items() if name != "folder"}
        (stage / "record.json").write_text(json.dumps(fields, sort_keys=True))
    return _stored(variant.key, inputs.key)


@contextlib.contextmanager
def _entry(key: str) -> Iterator[Path]:
    folder = cache.folder_of(key)
    cache.make_parent(folder)
    with files.staged_folder(folder) as stage:
        yield stage


@contextlib.contextmanager
def _work_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kernseal-") as name:
        yield Path(name)


def _kernels(
    variant: Variant, compiled: Compiled, assembled: Assembled, program: elf.Cubin
) -> tuple[KernelRecord, ...]:
    """What is known of each kernel that is launched.

    Raises:
        BuildFailed: the image has others, or lacks one.
    """
    if set(compiled.kernels) != set(program.entries):
        raise BuildFailed(
            f"{variant.key}: the cubin has {sorted(program.entries)}; launched are {sorted(compiled.kernels)}"
        )
    made = []
    for entry, smem in compiled.kernels.items():
        said = assembled.reports[entry]
        dynamic = smem if isinstance(smem, int) else elf.constant_u32(assembled.cubin, smem)
        registers = program.entries[entry].registers
        made.append(KernelRecord(entry, registers, said.spill_bytes, said.static_smem, dynamic))
    return tuple(made)


def _same_code(variant: Variant, ours: elf.Cubin, theirs: elf.Cubin) -> None:
    """Without a rule that changed the PTX, the pinned ptxas and the DSL's own must make the same program."""
    if ours.code_sha256 != theirs.code_sha256:
        raise BuildFailed(
            f"{variant.key}: code of the assembled cubin ({ours.code_sha256}) is not that of the DSL's"
            f" ({theirs.code_sha256}); "
            "the installed ptxas and CUTLASS DSL do not belong together"
        )


def _check_host(variant: Variant, data: bytes) -> None:
    """The host object may import the driver shim's functions and nothing else; it must not carry a cubin."""
    unknown = [
        name
        for name in elf.undefined_symbols(data)
        if not name.startswith("_cu") and name not in ALLOWED_IMPORTS
    ]
    if unknown:
        raise BuildFailed(f"{variant.key}: host object imports {', '.join(unknown)}")
    if data.count(b"\x7fELF") != 1:
        raise BuildFailed(f"{variant.key}: host object still carries an embedded image")
