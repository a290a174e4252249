"""An attacker process swaps a bundle's files, and the whole folder, while ``open_bundle`` opens it again and again.

    PYTHONPATH=tests python -m races.opens --opens 10000

Whatever is opened and prepared must be the true bytes: the evil library leaves a mark when it is loaded, the driver
(a fake one that records) shows the head of each image that it was handed. Ends with an error otherwise.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builds import PACKED, bundle, signing_key
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.native import ZIG, build_fake_driver, compile_c
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from kernseal.export import files, signing
from kernseal.loader import canonical
from kernseal.loader import library as loader_library
from kernseal.loader.bundle import open_bundle
from kernseal.loader.errors import KernsealError
from kernseal.loader.policy import Policy

LIBRARY, MANIFEST, ENVELOPE = "libkernseal.so", "manifest.json", "manifest.dsse.json"
IMAGE = f"cubin/gdn_prefill/{PACKED}.cubin"
VICTIMS = (LIBRARY, IMAGE, MANIFEST, ENVELOPE)
TRUE_END, REFUSED_AT_OPEN = "opened and prepared, all of it true", "refused at open"
PATIENCE = 120.0
MARK = "KERNSEAL_TEST_EVIL_MARK"
EVIL = f"""
#include <stdio.h>
#include <stdlib.h>
__attribute__((constructor)) static void loaded(void) {{
    const char *name = getenv("{MARK}");
    FILE *mark = name ? fopen(name, "w") : NULL;
    if (mark)
        fclose(mark);
}}
unsigned kseal_abi_version(void) {{ return 0; }}
"""


@dataclass(frozen=True)
class Scene:
    """The bundle under attack, its true files, and the attacker's: consistent in themselves, signed by a stranger."""

    bundle: Path
    pristine: Path
    evil: Path
    mark: Path


def set_up(work: Path) -> Scene:
    built = bundle("90").path
    scene = Scene(work / "bundle", work / "pristine", work / "evil", work / "mark")
    for folder in (scene.bundle, scene.pristine, scene.evil):
        shutil.copytree(built, folder)
    (work / "evil.c").write_text(EVIL)
    compile_c(ZIG, [work / "evil.c"], scene.evil / LIBRARY, "-shared", "-fPIC")
    image = (scene.evil / IMAGE).read_bytes()
    (scene.evil / IMAGE).write_bytes(image[:8] + b"EVIL" + image[12:])
    statement = json.loads((built / MANIFEST).read_bytes())
    for item in statement["subject"]:
        item["digest"]["sha256"] = files.sha256_file(scene.evil / item["name"])
    payload = canonical.dumps(statement)
    (scene.evil / MANIFEST).write_bytes(payload)
    (scene.evil / ENVELOPE).write_bytes(signing.sign(payload, stranger()))
    return scene


def stranger() -> signing.SigningKey:
    private = Ed25519PrivateKey.generate()
    pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return signing.find_key(environment={signing.ENVIRONMENT: pem.decode()})


def swap_until(stop: Any, scene: Scene) -> None:
    """Now and then everything is whole again, so that a loader that looks twice could be caught."""
    chance = random.Random(11)
    stage = scene.bundle.parent / "stage"
    while not stop.is_set():
        if chance.random() < 0.1:
            exchange(scene.bundle, scene.evil, chance.random() * 0.01)
        for name in chance.sample(VICTIMS, chance.randrange(1, 4)):
            tamper(chance, scene, name, stage)
        time.sleep(chance.random() * 0.004)
        for name in VICTIMS:
            put(stage, scene.bundle / name, (scene.pristine / name).read_bytes())
        time.sleep(chance.choice((0.0, 0.01, 0.04, 0.4)))  # long enough for an open on a busy machine, too


def exchange(one: Path, two: Path, seconds: float) -> None:
    """The folders change places, and change back."""
    aside = one.with_name("aside")
    for _ in range(2):
        one.rename(aside)
        two.rename(one)
        aside.rename(two)
        time.sleep(seconds)


def tamper(chance: random.Random, scene: Scene, name: str, stage: Path) -> None:
    path, evil = scene.bundle / name, scene.evil / name
    kind = chance.choice(("replace", "link", "truncate", "overwrite", "unlink", "fifo"))
    if kind == "replace":
        put(stage, path, evil.read_bytes())
    elif kind == "link":
        stage.unlink(missing_ok=True)
        stage.symlink_to(evil)
        stage.replace(path)
    elif kind == "truncate" and path.is_file() and not path.is_symlink():
        os.truncate(path, chance.randrange(64))
    elif kind == "overwrite" and path.is_file() and not path.is_symlink():
        path.write_bytes(evil.read_bytes())
    elif kind == "unlink":
        path.unlink(missing_ok=True)
    elif kind == "fifo":
        stage.unlink(missing_ok=True)
        os.mkfifo(stage)
        stage.replace(path)


def put(stage: Path, path: Path, data: bytes) -> None:
    stage.unlink(missing_ok=True)
    stage.write_bytes(data)
    stage.replace(path)


def attack(scene: Scene, opens: int, gpu: FakeGpu) -> Counter[str]:
    """Open at least ``opens`` times under attack and count how each ended.

    A refusal takes a fraction of a millisecond, so that hundreds fit into one moment in which a busy machine does not run
    the attacker: opens go on until both ends were met, for ``PATIENCE`` seconds at most.

    Raises:
        AssertionError: something that nobody vouched for was loaded.
    """
    true = {files.sha256_file(scene.pristine / LIBRARY)}
    head = (scene.pristine / IMAGE).read_bytes()[:16].hex()
    before = set(loader_library._loaded)
    policy = signing.trusting(Policy(), signing_key())
    os.environ[MARK] = str(scene.mark)
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    attacker = context.Process(target=swap_until, args=(stop, scene))
    attacker.start()
    ends: Counter[str] = Counter()
    try:
        deadline = time.monotonic() + PATIENCE
        while sum(ends.values()) < opens or (not both_met(ends) and time.monotonic() < deadline):
            gpu.reset()
            ends[one_open(scene, policy)] += 1
            assert {call["image"] for call in gpu.log("load")} <= {head}
            assert not scene.mark.exists()
            assert {digest.hex() for digest in loader_library._loaded.keys() - before} <= true
            assert attacker.is_alive()
    finally:
        stop.set()
        attacker.join(30)
        os.environ.pop(MARK)
    assert attacker.exitcode == 0
    return ends


def both_met(ends: Counter[str]) -> bool:
    """Without both, the attacker was not there at the right moments."""
    return ends[TRUE_END] > 0 and any(end.startswith(REFUSED_AT_OPEN) for end in ends)


def one_open(scene: Scene, policy: Policy) -> str:
    try:
        opened = open_bundle(scene.bundle, policy=policy)
    except KernsealError as error:
        return f"{REFUSED_AT_OPEN}: {error.status}"
    with opened:
        try:
            opened.prepare("gdn_prefill")
        except KernsealError as error:
            return f"opened, image refused: {error.status}"
        return TRUE_END


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--opens", type=int, default=10_000)
    opens = options.parse_args().opens
    with tempfile.TemporaryDirectory(prefix="kernseal-opens-") as name:
        gpu = FakeGpu(build_fake_driver(Path(name) / "driver"))
        began = time.monotonic()
        ends = attack(set_up(Path(name)), opens, gpu)
    assert both_met(ends), ends
    print(f"{sum(ends.values())} opens in {time.monotonic() - began:.0f} s; nothing unverified was loaded")
    for end, count in ends.most_common():
        print(f"{count:8d}  {end}")


if __name__ == "__main__":
    main()
