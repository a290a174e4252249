"""Runs the compiler of a class: a job in JSON, and files and an answer out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kernseal.export.compilers import Compilers
from kernseal.export.job import CuteAnswer, CuteJob, NvrtcAnswer, NvrtcJob
from kernseal.export.spec import Op, Target, Variant
from kernseal.loader.errors import BuildFailed

NAMES = {"cute": "CuTe DSL", "nvrtc": "NVRTC"}


@dataclass(frozen=True)
class Tools:
    """What a variant's build runs.

    Attributes:
        compilers: those of CuTe DSL and NVRTC.
        cuda_headers: of the pinned wheel, by the name that includes them.
    """

    ptxas: Path
    compilers: Compilers = field(hash=False)
    cuda_headers: Mapping[str, Path] = field(hash=False)


@dataclass(frozen=True)
class Compiled:
    """What a front end says of a variant beyond the files it left in the work folder.

    It leaves ``raw.ptx``; where it also assembles, ``dsl.cubin``; where it makes host code, ``host.o``.

    Attributes:
        kernels: name in PTX and cubin of each, and bytes of dynamic shared memory its launch needs, or the name of the
            constant in the cubin that says so.
        host_function: name of the host entry, without prefix; None where the library launches the kernels itself.
    """

    kernels: Mapping[str, int | str] = field(hash=False)
    host_function: str | None


def compile_variant(
    op: Op, variant: Variant, target: Target, tree: Path, tools: Tools, work: Path
) -> Compiled:
    """Compile one variant into ``work``.

    Raises:
        BuildFailed: the compiler refused; the message has its words.
    """
    if op.data["classes"][variant.class_name]["front_end"] == "nvrtc":
        return _nvrtc(op, variant, target, tree, tools, work)
    return _cute(op, variant, target, tree, tools, work)


def host_prefix(variant: Variant) -> str:
    """Prefix of the variant's host symbols: unique in a library."""
    return f"{variant.op}_{variant.id}"


def _cute(op: Op, variant: Variant, target: Target, tree: Path, tools: Tools, work: Path) -> Compiled:
    CuteJob(
        tree=str(tree),
        recipe=str(op.folder / op.data["recipe"]),
        cls=op.data["classes"][variant.class_name],
        axes=dict(variant.axes),
        arch=target.arch,
        host=target.host,
        prefix=host_prefix(variant),
        host_only=op.data.get("host_only", {}),
        runtime=str(tools.compilers.libraries["cute"]),
        out=str(work),
    ).save(work / "job.json")
    _work("cute", variant, target, tools, work)
    answer = CuteAnswer.load(work / "answer.json")
    outside = [name for name in answer.modules if not (tree / name).is_file()]
    if outside:
        raise BuildFailed(
            f"{variant.key}: the build imported files outside the source set: {', '.join(outside)}"
        )
    return Compiled(dict(answer.kernels), answer.host_function)


def _nvrtc(op: Op, variant: Variant, target: Target, tree: Path, tools: Tools, work: Path) -> Compiled:
    NvrtcJob(
        tree=str(tree),
        recipe=str(op.folder / op.data["recipe"]),
        cls=op.data["classes"][variant.class_name],
        axes=dict(variant.axes),
        arch=target.arch,
        library=str(tools.compilers.libraries["nvrtc"]),
        headers={name: str(path) for name, path in tools.cuda_headers.items()},
        out=str(work),
    ).save(work / "job.json")
    _work("nvrtc", variant, target, tools, work)
    answer = NvrtcAnswer.load(work / "answer.json")
    return Compiled(dict(answer.kernels), None)


def _work(front_end: str, variant: Variant, target: Target, tools: Tools, work: Path) -> None:
    try:
        tools.compilers.compile(front_end, work / "job.json")
    except BuildFailed as error:
        raise BuildFailed(f"{variant.key} for {target.name}: {NAMES[front_end]}: {error}") from None
