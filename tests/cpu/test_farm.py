"""Compiling on a real dask.distributed cluster: a scheduler and workers of its own, on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builds import PACKED, POOLED_HKV, ROOT, XQA, bundle, signing_key

from kernseal.export import build, farm, spec
from kernseal.export.build import Options
from kernseal.export.progress import Reporter, Silent
from kernseal.loader.errors import BuildFailed, InvalidArgument, ToolchainInvalid, Unsupported

VARIANTS = (PACKED, POOLED_HKV, XQA)
DASK = [sys.executable, "-m", "dask"]


class Cluster:
    """A scheduler and workers, each a process with a cache of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workers: list[subprocess.Popen[bytes]] = []
        self.file = folder / "scheduler.json"
        self.scheduler = self._start(
            "scheduler", "--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(self.file)
        )
        wait_for(self.file.exists)
        self.address = str(json.loads(self.file.read_text())["address"])

    def _start(self, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        log = self.folder / f"{arguments[0]}-{len(self.workers)}.log"
        with log.open("wb") as out:
            return subprocess.Popen(
                [*DASK, *arguments, "--no-dashboard"],
                stdout=out,
                stderr=out,
                cwd=self.folder,
                env={**os.environ, **environment},
            )

    def add_worker(self, **environment: str) -> None:
        name = f"w{len(self.workers)}"
        options = [
            "--nthreads",
            "1",
            "--no-nanny",
            "--name",
            name,
            "--local-directory",
            str(self.folder / name),
        ]
        cache = {"KERNSEAL_CACHE": str(self.folder / name / "cache")}
        self.workers.append(self._start("worker", self.address, *options, **cache, **environment))

    def wait_for_workers(self) -> None:
        for index in range(len(self.workers)):
            log = self.folder / f"worker-{index}.log"
            wait_for(lambda log=log: "Registered to" in log.read_text())

    def stop(self) -> None:
        for process in (*self.workers, self.scheduler):
            process.kill()
            process.wait()


def wait_for(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        yield made
    finally:
        made.stop()


def options(cluster: Cluster, *only: str) -> Options:
    return Options(only=only, scheduler=cluster.address, out=cluster.folder / "dist")


def build_there(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, *only: str, report: Reporter | None = None
) -> Path:
    monkeypatch.setenv("KERNSEAL_CACHE", str(cluster.folder / "client"))
    target = spec.Target("sm_90a")
    return build.build(spec.load_ops(), target, options(cluster, *only), signing_key(), report).path


def files_below(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


@pytest.mark.slow
def test_three_workers_of_which_one_is_killed_make_the_same_bundle(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = files_below(bundle("sm_90a", only=VARIANTS).path)
    for _ in range(3):
        cluster.add_worker()
    distributed = farm._distributed()
    with distributed.Client(cluster.address, set_as_default=False) as client:
        client.wait_for_workers(3)
        killer = subprocess.Popen(
            [sys.executable, "-c", KILLER, cluster.address, str(cluster.workers[1].pid)]
        )
        there = files_below(build_there(cluster, monkeypatch, *VARIANTS))
        assert killer.wait() == 0, "the second worker was compiling when it was killed"
        assert len(client.scheduler_info(n_workers=-1)["workers"]) == 2
    assert cluster.workers[1].wait() == -signal.SIGKILL
    assert here.keys() == there.keys()
    assert [name for name in here if here[name] != there[name]] == []


KILLER = """
import os, signal, sys, time
import distributed

address, pid = sys.argv[1], int(sys.argv[2])
with distributed.Client(address, set_as_default=False) as client:
    for _ in range(1200):
        workers = client.scheduler_info(n_workers=-1)["workers"]
        mine = [at for at, worker in workers.items() if worker["name"] == "w1"]
        if mine and client.processing().get(mine[0]):
            time.sleep(0.5)
            os.kill(pid, signal.SIGKILL)
            sys.exit(0)
        time.sleep(0.05)
sys.exit(1)
"""


@pytest.mark.slow
def test_a_worker_that_would_make_other_bytes_refuses(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernseal has another recipe."""
    links = cluster.folder / "links" / "kernseal"
    links.mkdir(parents=True)
    for name in ("abi", "export", "loader", "manifests", "patches"):
        (links / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "kernels", links / "kernels")
    with (links / "kernels/xqa_decode/recipe.py").open("a") as recipe:
        recipe.write("# changed\n")
    cluster.add_worker(PYTHONPATH=str(links.parent))
    cluster.wait_for_workers()
    words = (
        rf"xqa_decode/{XQA}: worker tcp://127\.0\.0\.1:\d+: recipe differ from the client's; install the same"
    )
    with pytest.raises(ToolchainInvalid, match=words):
        build_there(cluster, monkeypatch, XQA)
    assert not (cluster.folder / "dist").exists()


NO_KERNSEAL = """
import sys

class Hidden:
    def find_spec(self, name, *_):
        if name.startswith("kernseal."):
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Hidden())
"""
OTHER_KERNSEAL = """
import importlib.metadata

real = importlib.metadata.version
importlib.metadata.version = lambda name: "0.0.9" if name == "kernseal" else real(name)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("site", "has"),
    [
        (NO_KERNSEAL, "ModuleNotFoundError: No module named 'kernseal.export'"),
        (OTHER_KERNSEAL, "kernseal 0.0.9"),
    ],
)
def test_a_worker_without_this_kernseal_is_named_before_anything_is_submitted(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, site: str, has: str
) -> None:
    hidden = cluster.folder / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(site)
    cluster.add_worker(PYTHONPATH=str(hidden))
    cluster.wait_for_workers()
    words = rf"worker tcp://127\.0\.0\.1:\d+: {has}; install kernseal\[export,farm\] 0\.1\.0 there"
    with pytest.raises(ToolchainInvalid, match=words):
        build_there(cluster, monkeypatch, XQA)
    assert cluster.workers[0].poll() is None, "no task closed it"
    assert not (cluster.folder / "dist").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "words"),
    [
        ("workers", r"no worker was left for 1 s, 1 variants to go; start some and build again"),
        ("scheduler", r"(lost|xqa_decode/.*): \w*(Error|Cancelled)"),
    ],
)
def test_a_farm_that_dies_fails_the_build_and_leaves_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, victim: str, words: str
) -> None:
    monkeypatch.setattr(farm, "CONNECT_SECONDS", 5)
    monkeypatch.setattr(farm, "WORKERLESS_SECONDS", 1)
    monkeypatch.setattr(farm, "CHECK_SECONDS", 0.2)
    cluster.add_worker()
    cluster.wait_for_workers()
    notes: list[str] = []

    class Watch(Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    def kill() -> None:
        wait_for(lambda: "compile_here" in str(client.processing()))
        for process in cluster.workers if victim == "workers" else [cluster.scheduler]:
            process.kill()

    distributed = farm._distributed()
    with distributed.Client(cluster.address, set_as_default=False, timeout=5) as client:
        killer = threading.Thread(target=kill)
        killer.start()
        began = time.monotonic()
        with pytest.raises(BuildFailed, match=words):
            build_there(cluster, monkeypatch, XQA, report=Watch())
        assert time.monotonic() - began < 60
        killer.join()
    assert not (cluster.folder / "dist").exists()
    if victim == "workers":
        assert "no worker is left, 1 variants to go: waiting 1 s for one" in notes


@pytest.mark.slow
def test_a_cluster_without_workers_is_refused(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match=r"--scheduler 'tcp://.*': the cluster has no worker"):
        build_there(cluster, monkeypatch, XQA)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "no such thing://x"])
def test_a_scheduler_that_is_not_there_is_named(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(farm, "CONNECT_SECONDS", 1)
    with pytest.raises(InvalidArgument, match=f"--scheduler '{address}': "):
        farm.compile_all(address, spec.Target("sm_90a"), [], {}, Silent())


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(Unsupported, match=r"install kernseal\[farm\]"):
        farm.compile_all("tcp://farm:1", spec.Target("sm_90a"), [], {}, Silent())


@pytest.mark.parametrize(
    "address", ["nowhere", "farm:8786", "tcp://farm", "tcp://:8786", "udp://farm:8786", ""]
)
def test_an_address_that_is_none_is_refused_cached_or_not(address: str) -> None:
    with pytest.raises(
        InvalidArgument, match=f"--scheduler '{address}': not an address; supported is PROTOCOL"
    ):
        Options(scheduler=address)


@pytest.mark.parametrize(
    "address", ["tcp://farm:8786", "tls://10.0.0.1:1", "tcp://[::1]:8786", "ws://a-b.c:80"]
)
def test_addresses_that_dask_prints_are_taken(address: str) -> None:
    assert Options(scheduler=address).scheduler == address


@pytest.mark.parametrize("error", [RuntimeError("killed three"), asyncio.CancelledError("scheduler lost")])
def test_whatever_dask_raises_fails_the_build_by_name(error: BaseException) -> None:
    with pytest.raises(BuildFailed, match=f"op/v: {type(error).__name__}: {error}"), farm._failing("op/v"):
        raise error


def test_what_a_worker_refuses_keeps_its_type() -> None:
    with pytest.raises(ToolchainInvalid, match=r"^worker w$"), farm._failing("op/v"):
        raise ToolchainInvalid("worker w")
