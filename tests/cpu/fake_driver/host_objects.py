"""Variants compiled for the tests: the exporter's host object, and CuTe's own with its header, from one compile."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cpu.fake_driver.kernseal_library import record_of
from elftools.elf.elffile import ELFFile

from kernseal.abi.library import KernelRecord, VariantRecord
from kernseal.export import build, files, patch, paths, source, spec, toolchain
from kernseal.export.front_end import host_prefix
from kernseal.export.job import CuteAnswer, CuteJob

WORKER = Path(__file__).resolve().parent / "reference_worker.py"
KPARAM_INFO = 0x17  # EIATTR_KPARAM_INFO: one record for each parameter of a kernel


@dataclass(frozen=True)
class HostObject:
    """One compiled variant.

    Attributes:
        ours: the exporter's host object.
        theirs: CuTe's own, with its cubin embedded.
        header: CuTe's C header for it.
    """

    target: spec.Target
    variant: spec.Variant
    answer: CuteAnswer
    folder: Path

    @property
    def prefix(self) -> str:
        return host_prefix(self.variant)

    @property
    def ours(self) -> Path:
        return self.folder / "host.o"

    @property
    def theirs(self) -> Path:
        return self.folder / f"{self.prefix}.o"

    @property
    def header(self) -> str:
        return (self.folder / f"{self.prefix}.h").read_text()

    @property
    def cubin(self) -> bytes:
        return (self.folder / "dsl.cubin").read_bytes()

    @property
    def ptx(self) -> str:
        return (self.folder / "raw.ptx").read_text()

    @property
    def record(self) -> VariantRecord:
        kernels = [KernelRecord(entry, 0, 0, 0, smem) for entry, smem in self.answer.kernels]
        return record_of(self.variant, self.cubin, kernels, self.prefix, self.answer.host_function)

    def param_sizes(self, kernel: int = 0) -> list[int]:
        """Bytes of every parameter of one of its kernels, from the cubin."""
        entry, _ = self.answer.kernels[kernel]
        with (self.folder / "dsl.cubin").open("rb") as file:
            section = ELFFile(file).get_section_by_name(f".nv.info.{entry}")
            assert section is not None
            return parse_param_sizes(section.data())


def parse_param_sizes(info: bytes) -> list[int]:
    """Records of .nv.info are format, attribute, and a 16-bit value or the length of what follows."""
    sizes: dict[int, int] = {}
    at = 0
    while at < len(info):
        kind, attribute = info[at], info[at + 1]
        value = int.from_bytes(info[at + 2 : at + 4], "little")
        at += 4
        if kind != 4:
            continue
        if attribute == KPARAM_INFO:
            ordinal = int.from_bytes(info[at + 4 : at + 6], "little")
            sizes[ordinal] = int.from_bytes(info[at + 8 : at + 12], "little") >> 18
        at += value
    return [sizes[ordinal] for ordinal in range(len(sizes))]


def unavailable() -> str | None:
    """Why nothing can be compiled here, or None."""
    try:
        toolchain.dsl_runtime_path()
    except Exception as error:  # whatever it is, it is the reason
        return f"CUTLASS DSL is not installed as pinned: {error}"
    return None


@functools.cache
def compiled(
    sm: str, retarget: str | None = None, *, op_name: str = "gdn_prefill", **changes: str | bool | int
) -> HostObject:
    """The op's variant at its default axes with ``changes``; compiled once, then kept in kernseal's cache folder."""
    op = spec.load_op(paths.kernels() / op_name)
    target = spec.Target(sm, retarget)
    variant = op.variant(target, {**op.data["defaults"], **changes})
    planned = build.plan([op], target, build.Options(profile="full", only=(variant.id,)))
    (item,) = planned.planned
    worker = files.sha256_file(WORKER)
    folder = paths.cache() / "tests" / hashlib.sha256(f"{item.inputs.key} {worker}".encode()).hexdigest()
    if not (folder / "answer.json").is_file():
        _compile(op, variant, target, planned, folder)
    return HostObject(target, variant, CuteAnswer.load(folder / "answer.json"), folder)


def _compile(
    op: spec.Op, variant: spec.Variant, target: spec.Target, planned: build.Plan, folder: Path
) -> None:
    with tempfile.TemporaryDirectory(prefix="kernseal-test-") as name:
        work = Path(name)
        opened, _ = source.open_source(None, source.upstream())
        tree = patch.apply(source.read_set(opened, source.source_set(op.folder)), planned.patches[op.name])
        for path, data in tree.items():
            (work / "tree" / path).parent.mkdir(parents=True, exist_ok=True)
            (work / "tree" / path).write_bytes(data)
        (work / "out").mkdir()
        CuteJob(
            tree=str(work / "tree"),
            recipe=str(op.folder / op.data["recipe"]),
            cls=op.data["classes"][variant.class_name],
            axes=dict(variant.axes),
            arch=target.arch,
            host=target.host,
            prefix=host_prefix(variant),
            host_only=op.data.get("host_only", {}),
            runtime=str(toolchain.dsl_runtime_path()),
            out=str(work / "out"),
        ).save(work / "job.json")
        environment = {**os.environ, "CUTE_DSL_CACHE_DIR": str(work), "CUTE_DSL_DISABLE_FILE_CACHING": "1"}
        command = [sys.executable, str(WORKER), str(work / "job.json")]
        done = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        staged = folder.with_name(f"{folder.name}.{os.getpid()}")
        shutil.copytree(work / "out", staged, ignore=shutil.ignore_patterns("dump"))
        try:
            staged.rename(folder)
        except OSError:  # another worker was first
            shutil.rmtree(staged)


def header_arguments(header: str) -> list[tuple[str, int, int]]:
    """CuTe's argument list, in order: name, and for a tensor its dynamic extents and strides (-1, -1 for a scalar)."""
    structs = {
        name: (_count(body, "dynamic_shapes"), _count(body, "dynamic_strides"))
        for body, name in re.findall(r"typedef struct \{([^}]*)\} \w+?_Tensor_(\w+)_t;", header)
    }
    match = re.search(r"void \*args\[\d+\] = \{\s*(.*?),\s*&ret\s*\}", header, re.DOTALL)
    assert match is not None
    names = [name.strip() for name in match[1].split(",")]
    return [(n[1:], -1, -1) if n.startswith("&") else (n, *structs[n]) for n in names]


def _count(body: str, field: str) -> int:
    match = re.search(rf"{field}\[(\d+)\]", body)
    return int(match[1]) if match else 0
