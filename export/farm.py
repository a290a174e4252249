"""Compiles on a ``dask.distributed`` cluster that is already there: the same variants, the same bytes, into the same cache.

The client sends the patched source and the digest of every input; a worker whose own recipe, toolchain or builder differ in
one refuses. Dask gives the variants of a worker that is lost to the others.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernseal.export import build, patch, paths, spec, toolchain
from kernseal.export import variant as variants
from kernseal.export.compilers import Compilers
from kernseal.export.front_end import Tools
from kernseal.export.progress import Reporter
from kernseal.export.spec import Target
from kernseal.export.variant import Built
from kernseal.loader.errors import BuildFailed, InvalidArgument, ToolchainInvalid, Unsupported

CONNECT_SECONDS = 30


@dataclass(frozen=True)
class Task:
    """One variant to compile on a worker.

    Attributes:
        variant: ``op/id``.
        inputs: ``VariantInputs.summary`` of the client.
    """

    variant: str
    target: Target
    inputs: Mapping[str, str] = field(hash=False)


def compile_all(
    scheduler: str,
    target: Target,
    missing: Sequence[build.Planned],
    trees: Mapping[str, Mapping[str, bytes]],
    report: Reporter,
) -> dict[str, Built]:
    """Every variant of ``missing``, compiled there and put into the cache here.

    Args:
        scheduler: address, such as ``tcp://farm:8786``.
        trees: by op, its patched source set: each file by its path.

    Raises:
        Unsupported: ``distributed`` is not installed.
        InvalidArgument: nobody answers at ``scheduler``, or the cluster has no worker.
        ToolchainInvalid: a worker would make other bytes; it is named, with the inputs that differ.
        BuildFailed: a compile failed, or several workers died of it.
    """
    try:
        distributed = _distributed()
    except ImportError as error:
        raise Unsupported(f"--scheduler {scheduler!r}: {error}; install kernseal[farm]") from None
    try:
        client = distributed.Client(scheduler, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"--scheduler {scheduler!r}: {error or 'no answer'}") from None
    with client, client.as_current():
        if not client.scheduler_info(n_workers=-1)["workers"]:
            raise InvalidArgument(
                f"--scheduler {scheduler!r}: the cluster has no worker; start some, see docs/building.md"
            )
        return _compile(client, target, missing, trees, report)


def _compile(
    client: Any,
    target: Target,
    missing: Sequence[build.Planned],
    trees: Mapping[str, Mapping[str, bytes]],
    report: Reporter,
) -> dict[str, Built]:
    # A task of its own, and not scattered: what is scattered to a worker is lost with it.
    sent = {name: client.submit(dict, tree, pure=False) for name, tree in trees.items()}
    waiting = {}
    for item in missing:
        task = Task(item.variant.key, target, item.inputs.summary())
        waiting[client.submit(compile_here, task, sent[item.op.name], pure=False)] = item
    built = {}
    try:
        with report.steps(f"compile {target.name} on {client.scheduler.address}", len(missing)) as step:
            for future in _distributed().as_completed(waiting):
                item = waiting[future]
                built[item.variant.key] = variants.store(
                    item.variant.key, item.inputs.key, _result(future, item)
                )
                step(item.variant.key)
    except BaseException:
        client.cancel(list(waiting))
        raise
    return built


def _result(future: Any, item: build.Planned) -> dict[str, bytes]:
    try:
        found: dict[str, bytes] = future.result()
    except _distributed().KilledWorker as error:
        raise BuildFailed(f"{item.variant.key}: {error}") from None
    return found


def _distributed() -> Any:
    """The library, which has no types. Imported when asked for: it costs a second that no other build should pay."""
    return importlib.import_module("distributed")


def compile_here(task: Task, tree: Mapping[str, bytes]) -> dict[str, bytes]:
    """On a worker: the files of the variant's entry in the cache, compiled unless the worker's own cache has them.

    Raises:
        ToolchainInvalid: this worker would make other bytes.
        KernsealError: as a build here would.
    """
    op = spec.load_op(paths.kernels() / task.variant.partition("/")[0])
    made = build.plan([op], task.target, build.Options(only=(task.variant,)))
    (item,) = made.planned
    ours = item.inputs.summary()
    if other := [name for name, digest in task.inputs.items() if ours.get(name) != digest]:
        raise ToolchainInvalid(
            f"{task.variant}: worker {_address()}: {', '.join(other)} differ from the client's;"
            " install the same kernseal[export] there"
        )
    found = variants.cached(item.inputs.key)
    if found is None:
        with tempfile.TemporaryDirectory(prefix="kernseal-source-") as name:
            patch.write_tree(Path(name), tree)
            found = variants.build(
                op, item.variant, task.target, item.inputs, Path(name), made.rules, _tools()
            )
    return variants.files_of(found)


def _address() -> str:
    return str(_distributed().get_worker().address)


@functools.cache
def _tools() -> Tools:
    """Of this worker, for as long as it lives: its compilers are imported once."""
    compilers = Compilers(cute=toolchain.dsl_runtime_path(), nvrtc=toolchain.nvrtc_path())
    atexit.register(compilers.__exit__)
    return Tools(toolchain.ptxas_path(), compilers, toolchain.cuda_headers())
