"""Builds one variant into the cache: compile, PTX rules, assemble, inspect. The cache key covers every input."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kernseal.export import assemble, elf, files, limits, paths, ptx
from kernseal.export.inputs import VariantInputs
from kernseal.export.job import CuteAnswer, CuteJob
from kernseal.export.ptx import PtxRule
from kernseal.export.run import run
from kernseal.export.spec import Op, Target, Variant
from kernseal.loader.errors import BuildFailed

FILES = ("raw.ptx", "kernel.ptx", "kernel.cubin", "host.o")
ALLOWED_IMPORTS = ("_GLOBAL_OFFSET_TABLE_", "cuda_dialect_assert_success")


@dataclass(frozen=True)
class Built:
    """One variant in the cache.

    Attributes:
        folder: holds ``raw.ptx`` (as compiled), ``kernel.ptx`` (as assembled), ``kernel.cubin`` and ``host.o``.
        sha256: of each of these.
        rules: PTX rule to replacements made.
    """

    folder: Path
    entry: str
    host_function: str
    registers: int
    spill_bytes: int
    static_smem: int
    dynamic_smem: int
    code_sha256: str
    sha256: Mapping[str, str]
    rules: Mapping[str, int]

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()


@dataclass(frozen=True)
class Tools:
    """Paths of the tools that a variant's build runs."""

    ptxas: Path
    dsl_runtime: Path


def cached(key: str) -> Built | None:
    """The cache's entry for ``key`` if it is there and its files are the ones it was made with."""
    folder = _folder(key)
    try:
        record = json.loads((folder / "record.json").read_text())
        built = Built(folder=folder, **record)
        for name in FILES:
            if files.sha256_file(folder / name) != built.sha256[name]:
                return None
    except (FileNotFoundError, json.JSONDecodeError, TypeError, KeyError):
        return None
    return built


def _folder(key: str) -> Path:
    return paths.cache() / "variants" / key[:2] / key


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
    with files.staged_folder(_folder(inputs.key)) as stage, _work_folder() as work:
        answer = _compile(op, variant, target, tree, tools, work)
        raw = (work / "raw.ptx").read_bytes()
        patched, counts = ptx.apply(raw.decode(), rules, variant, target)
        assembled = assemble.assemble(tools.ptxas, target.arch, patched.encode(), work)
        program = elf.read(assembled.cubin)
        if answer.entry not in program.entries:
            raise BuildFailed(f"{variant.key}: entry {answer.entry} is not in the cubin")
        if patched.encode() == raw:
            _same_code(variant, program, elf.read((work / "dsl.cubin").read_bytes()))
        limits.check(
            f"{variant.key} for {target.name}",
            target.arch,
            patched,
            assembled.static_smem,
            answer.dynamic_smem,
        )
        host = (work / "host.o").read_bytes()
        _check_host(variant, host)
        contents = {
            "raw.ptx": raw,
            "kernel.ptx": patched.encode(),
            "kernel.cubin": assembled.cubin,
            "host.o": host,
        }
        entry = program.entries[answer.entry]
        record = Built(
            folder=Path(),
            entry=answer.entry,
            host_function=answer.host_function,
            registers=entry.registers,
            spill_bytes=assembled.spill_bytes,
            static_smem=assembled.static_smem,
            dynamic_smem=answer.dynamic_smem,
            code_sha256=program.code_sha256,
            sha256={name: files.sha256_bytes(data) for name, data in contents.items()},
            rules=counts,
        )
        for name, data in contents.items():
            (stage / name).write_bytes(data)
        fields = {name: value for name, value in asdict(record).items() if name != "folder"}
        (stage / "record.json").write_text(json.dumps(fields, sort_keys=True))
    found = cached(inputs.key)
    if found is None:
        raise BuildFailed(
            f"{variant.key}: the cache at {_folder(inputs.key)} does not hold what was just written"
        )
    return found


@contextlib.contextmanager
def _work_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kernseal-") as name:
        yield Path(name)


def _compile(op: Op, variant: Variant, target: Target, tree: Path, tools: Tools, work: Path) -> CuteAnswer:
    cls = op.data["classes"][variant.class_name]
    job = CuteJob(
        tree=str(tree),
        recipe=str(op.folder / op.data["recipe"]),
        cls=cls,
        axes=dict(variant.axes),
        arch=target.arch,
        host=target.host,
        prefix=host_prefix(variant),
        host_only=op.data.get("host_only", {}),
        runtime=str(tools.dsl_runtime),
        out=str(work),
    )
    job.save(work / "job.json")
    command = [sys.executable, "-m", "kernseal.export.cute_worker", str(work / "job.json")]
    done = run(command, work, _environment(work))
    if done.returncode:
        raise BuildFailed(
            f"{variant.key} for {target.name}: CuTe DSL: {(done.stderr or done.stdout).strip()[-3000:]}"
        )
    answer = CuteAnswer.load(work / "answer.json")
    outside = [name for name in answer.modules if not (tree / name).is_file()]
    if outside:
        raise BuildFailed(
            f"{variant.key}: the build imported files outside the source set: {', '.join(outside)}"
        )
    return answer


def host_prefix(variant: Variant) -> str:
    """Prefix of the variant's host symbols: unique in a library."""
    return f"{variant.op}_{variant.id}"


def _environment(work: Path) -> dict[str, str]:
    """What the compiler sees of the caller's environment: nothing that could reach its output."""
    kept = {
        name: os.environ[name]
        for name in ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")
        if name in os.environ
    }
    home = {
        "HOME": str(work),
        "TMPDIR": str(work),
        "CUTE_DSL_CACHE_DIR": str(work),
        "XDG_CACHE_HOME": str(work),
    }
    fixed = {
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return {**kept, **home, **fixed, "CUTE_DSL_DISABLE_FILE_CACHING": "1"}


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
