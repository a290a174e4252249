"""Many builds and verifications at once on one cache and few output folders, some of them killed at random.

    PYTHONPATH=tests python -m races.builds --builds 200 --at-once 40 --kills 60

No verification accepts anything but the true bundle, a folder under a bundle's name is always a whole one, every build
that was not killed succeeds, and nothing waits for the dead. Ends with an error otherwise.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from builds import CACHE, PACKED, ROOT, bundle, signing_key

from kernseal.export import signing
from kernseal.loader.policy import Policy
from kernseal.loader.verify import verify_bundle
from kernseal.loader.violations import VerificationFailed

NAME = "sm_90a-linux-x86_64"
SECONDS_A_BUILD = 120
RECOMPILE = 0.03


@dataclass
class Report:
    """How a race went.

    Attributes:
        finished: builds that ran to their end, all of them with exit code 0.
        killed: builds that were killed with signal 9.
        accepted: verifications that accepted, all of them the true bytes.
        refused: verifications that did not, by status.
    """

    finished: int = 0
    killed: int = 0
    accepted: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


def race(work: Path, *, builds: int, at_once: int, kills: int, folders: int = 4, seed: int = 1) -> Report:
    """Run the race in ``work``.

    Raises:
        AssertionError: one of the promises above is broken.
    """
    began = time.monotonic()
    true = verify_bundle(bundle("90", only=(PACKED,)).path, policy=trust(signing_key())).files
    outs = [work / f"out{number}" for number in range(folders)]
    keys = prepare(work)
    context = multiprocessing.get_context("fork")
    stop, results = context.Event(), context.Queue()
    watchers = [
        context.Process(target=watch, args=(stop, results, outs, keys, true, seed + i)) for i in range(2)
    ]
    for watcher in watchers:
        watcher.start()
    report = Report()
    try:
        run_builds(work, outs, keys, report, random.Random(seed), builds, at_once, kills)
    finally:
        stop.set()
        found = [results.get(timeout=60) for _ in watchers]
        for watcher in watchers:
            watcher.join(60)
    refused: Counter[str] = Counter()
    for accepted, refusals, wrong in found:
        assert not wrong, wrong
        report.accepted += accepted
        refused.update(refusals)
    report.refused = dict(refused)
    check_end(work, outs, keys, true)
    report.seconds = time.monotonic() - began
    return report


def trust(*keys: signing.SigningKey) -> Policy:
    policy = Policy()
    for key in keys:
        policy = signing.trusting(policy, key)
    return policy


def prepare(work: Path) -> list[Path]:
    """A warm cache of the race's own, and two signers, so that builds replace each other's bundles."""
    shutil.copytree(CACHE, work / "cache", ignore=shutil.ignore_patterns("dist", "*.lock", "tests.*"))
    keys = [work / "one.pem", work / "two.pem"]
    for key in keys:
        signing.keygen(key)
    return keys


def start(work: Path, key: Path, out: Path, chance: random.Random) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "kernseal.export.cli",
        "build",
        "--sm",
        "90",
        "--variant",
        PACKED,
        "--quiet",
    ]
    command += ["--key", str(key), "--out", str(out), "--jobs", "1"]
    if chance.random() < RECOMPILE:
        command.append("--no-cache")  # so that the cache's own entries are replaced under the others' hands
    environment = {**os.environ, "KERNSEAL_CACHE": str(work / "cache")}
    log = (work / "build.log").open("ab")
    with log:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )


def run_builds(
    work: Path,
    outs: list[Path],
    keys: list[Path],
    report: Report,
    chance: random.Random,
    builds: int,
    at_once: int,
    kills: int,
) -> None:
    deadline = time.monotonic() + SECONDS_A_BUILD + builds * 10
    running: list[subprocess.Popen[bytes]] = []
    started = 0
    # A build that was to die can end first: then there is one more.
    while started < builds or running or report.killed < kills:
        assert time.monotonic() < deadline, f"{len(running)} builds still wait: a deadlock"
        while len(running) < at_once and (started < builds or (not running and report.killed < kills)):
            running.append(start(work, chance.choice(keys), chance.choice(outs), chance))
            started += 1
        time.sleep(chance.random() * 0.2)
        # As many kills for each build that is left as will use them up.
        left = max(0, builds - started) + len(running)
        if (
            report.killed < kills
            and chance.random() < (kills - report.killed) / max(1, left) * 0.5 * at_once**0.5
        ):
            kill(chance.choice(running), report)
        running = [child for child in running if not ended(child, report, work)]


def kill(child: subprocess.Popen[bytes], report: Report) -> None:
    if child.poll() is None:
        child.send_signal(signal.SIGKILL)
        if child.wait() == -signal.SIGKILL:
            report.killed += 1


def ended(child: subprocess.Popen[bytes], report: Report, work: Path) -> bool:
    code = child.poll()
    if code is None:
        return False
    if code != -signal.SIGKILL:
        assert code == 0, f"exit code {code}:\n{(work / 'build.log').read_text()[-2000:]}"
        report.finished += 1
    return True


def watch(
    stop: Any, results: Any, outs: list[Path], keys: list[Path], true: dict[str, str], seed: int
) -> None:
    """Verify all the time; tell how often it was accepted, refused and why, and what was wrong."""
    chance = random.Random(seed)
    policy = trust(*(signing.read_private(key) for key in keys))
    accepted, refused, wrong = 0, Counter[str](), []
    while not stop.is_set():
        path = chance.choice(outs) / NAME
        try:
            found = verify_bundle(path, policy=policy)
        except VerificationFailed as error:
            # A folder that is being replaced goes away file by file; its files never change.
            refused.update({violation.status for violation in error.violations})
            if {violation.status for violation in error.violations} != {"missing"}:
                wrong.append(str(error))
        else:
            accepted += 1
            other = sorted(
                name for name in {**found.files, **true} if found.files.get(name) != true.get(name)
            )
            if other:  # or somebody has edited the sources since this began
                wrong.append(f"accepted at {path}: other bytes of {', '.join(other)}")
        time.sleep(0.05)
    results.put((accepted, dict(refused), wrong[:5]))


def check_end(work: Path, outs: list[Path], keys: list[Path], true: dict[str, str]) -> None:
    """What the killed left behind is no bundle, and the next build makes good and tidies up."""
    policy = trust(*(signing.read_private(key) for key in keys))
    for out in outs:
        path = out / NAME
        if path.exists():
            assert dict(verify_bundle(path, policy=policy).files) == dict(true)
        child = start(work, keys[0], out, random.Random(0))
        assert child.wait(SECONDS_A_BUILD) == 0, (work / "build.log").read_text()[-2000:]
        assert dict(verify_bundle(path, policy=policy).files) == dict(true)
    left = sorted(path.name for out in outs for path in out.iterdir())
    assert {name for name in left if name.endswith(".partial") or ".old-" in name} == set(), left


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--builds", type=int, default=200)
    options.add_argument("--at-once", type=int, default=40)
    options.add_argument("--kills", type=int, default=60)
    options.add_argument("--seed", type=int, default=1)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="kernseal-races-") as name:
        report = race(
            Path(name), builds=chosen.builds, at_once=chosen.at_once, kills=chosen.kills, seed=chosen.seed
        )
    print(
        f"{chosen.builds} builds, {chosen.at_once} at once: {report.finished} finished, {report.killed} killed; "
        f"verifications: {report.accepted} accepted (all of them true), refused {report.refused}; "
        f"{report.seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
