"""Compiles on a ``dask.distributed`` cluster that is already there: the same variants, the same bytes, into the same cache.

The client sends the patched source and the digest of every input; a worker whose own recipe, toolchain or builder differ in
one refuses. Dask gives the variants of a worker that is lost to the others.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import importlib
import importlib.metadata
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from kernseal.loader.errors import (
    BuildFailed,
    InvalidArgument,
    KernsealError,
    ToolchainInvalid,
    Unsupported,
)

CONNECT_SECONDS = 30
WORKERLESS_SECONDS = 120
"""How long a build waits for a worker where none is left."""
CHECK_SECONDS = 2
POLL_SECONDS = 0.05


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
        ToolchainInvalid: a worker lacks this kernseal, or would make other bytes; it is named, with what differs.
        BuildFailed: a compile failed, several workers died of it, or the scheduler or all workers were lost.
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
        if not _workers(client):
            raise InvalidArgument(
                f"--scheduler {scheduler!r}: the cluster has no worker; start some, see docs/building.md"
            )
        _check_workers(client)
        return _compile(client, target, missing, trees, report)


def _workers(client: Any) -> Mapping[str, Any]:
    """The cluster's workers, by their addresses."""
    with _failing("its scheduler is lost"):
        found: Mapping[str, Any] = client.scheduler_info(n_workers=-1)["workers"]
    return found


def _check_workers(client: Any) -> None:
    """Ask every worker for its kernseal: dask closes one that cannot read its task, and gives the task to the next.

    Raises:
        ToolchainInvalid: a worker has none, or another version.
    """
    ours = importlib.metadata.version("kernseal")
    with _failing("its workers could not be asked for their versions"):
        said = client.run(_version_query(), on_error="return")
    for worker, theirs in sorted(said.items()):
        if isinstance(theirs, OSError):
            continue  # lost meanwhile
        if theirs != ours:
            has = (
                f"{type(theirs).__name__}: {theirs}"
                if isinstance(theirs, Exception)
                else f"kernseal {theirs}"
            )
            raise ToolchainInvalid(
                f"worker {worker}: {has}; install kernseal[export,farm] {ours} there, the version of the client"
            )


def _version_query() -> Callable[[], str]:
    """A function that travels as its code: one that travels by name needs kernseal to be read."""

    def version() -> str:
        importlib.import_module("kernseal.export.farm")
        return importlib.metadata.version("kernseal")

    return version


@contextlib.contextmanager
def _failing(what: str) -> Iterator[None]:
    """Whatever dask raises as a failed build. Typed errors of a worker stay what they are."""
    try:
        yield
    except KernsealError:
        raise
    except (Exception, asyncio.CancelledError) as error:
        raise BuildFailed(f"{what}: {type(error).__name__}: {error}") from error


def _compile(
    client: Any,
    target: Target,
    missing: Sequence[build.Planned],
    trees: Mapping[str, Mapping[str, bytes]],
    report: Reporter,
) -> dict[str, Built]:
    waiting: dict[Any, build.Planned] = {}
    built = {}
    try:
        with _failing("the variants could not be submitted"):
            # A task of its own, and not scattered: what is scattered to a worker is lost with it.
            sent = {name: client.submit(dict, tree, pure=False) for name, tree in trees.items()}
            for item in missing:
                task = Task(item.variant.key, target, item.inputs.summary())
                waiting[client.submit(compile_here, task, sent[item.op.name], pure=False)] = item
        with report.steps(f"compile {target.name} on {client.scheduler.address}", len(missing)) as step:
            for future in _as_completed(client, waiting, report):
                item = waiting[future]
                with _failing(item.variant.key):
                    found = future.result()
                built[item.variant.key] = variants.store(item.variant.key, item.inputs.key, found)
                step(item.variant.key)
    except BaseException:
        with contextlib.suppress(
            Exception, asyncio.CancelledError
        ):  # of a scheduler that is not there any more
            client.cancel(list(waiting))
        raise
    return built


def _as_completed(client: Any, waiting: Mapping[Any, build.Planned], report: Reporter) -> Iterator[Any]:
    """Each future as it ends.

    Raises:
        BuildFailed: for ``WORKERLESS_SECONDS`` the cluster had no worker; dask itself would wait for ever.
    """
    done = _distributed().as_completed(waiting)
    checked = time.monotonic()
    lost: float | None = None
    for left in range(len(waiting), 0, -1):
        while not done.has_ready():
            time.sleep(POLL_SECONDS)
            if time.monotonic() - checked < CHECK_SECONDS:
                continue
            workers, checked = _workers(client), time.monotonic()
            if workers:
                lost = None
            elif lost is None:
                lost = checked
                report.note(
                    f"no worker is left, {left} variants to go: waiting {WORKERLESS_SECONDS} s for one"
                )
            elif checked - lost > WORKERLESS_SECONDS:
                raise BuildFailed(
                    f"no worker was left for {WORKERLESS_SECONDS} s, {left} variants to go; start some and build"
                    " again: what was compiled is in the cache"
                )
        yield next(done)


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
