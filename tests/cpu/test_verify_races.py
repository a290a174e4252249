"""An attacker changes the bundle while it is being verified: what comes out is verified bytes or a typed refusal.

``KERNSEAL_SWAPS=10000 python -m pytest tests/cpu/test_verify_races.py`` makes more rounds than the suite does.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import synthetic_bundle as made

from kernseal.loader.verify import EVERYTHING, VerifiedBundle, verify_bundle
from kernseal.loader.violations import VerificationFailed

ROUNDS = int(os.environ.get("KERNSEAL_SWAPS", "2000"))
VICTIMS = ("libkernseal.so", "cubin/gdn_prefill/bf16_hvk.cubin", made.MANIFEST, made.ENVELOPE)


def test_an_attacker_who_swaps_files_meanwhile_never_gets_unverified_bytes_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = made.make(tmp_path / "bundle")
    evil = made.make(tmp_path / "evil", salt="evil")
    evil.put_manifest((evil.path / made.MANIFEST).read_bytes(), made.STRANGER)
    policy = bundle.policy()
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    attacker = context.Process(target=swap_until, args=(stop, bundle, evil.path))
    attacker.start()
    accepted = refused = 0
    try:
        for _ in range(ROUNDS):
            try:
                result = verify_bundle(bundle.path, policy=policy, keep=EVERYTHING, now=made.NOW)
            except VerificationFailed:
                refused += 1
                continue
            accepted += 1
            assert bytes_of(result) == bundle.contents
    finally:
        stop.set()
        attacker.join(30)
    with capsys.disabled():
        print(
            f"\nswaps during {ROUNDS} verifications: accepted (all of them true) {accepted}, refused {refused}"
        )
    assert attacker.exitcode == 0
    assert accepted + refused == ROUNDS
    # Both must happen, or the attacker was not there at the right moments.
    assert accepted > 0
    assert refused > 0


def test_kept_bytes_survive_the_destruction_of_the_bundle(tmp_path: Path) -> None:
    bundle = made.make(tmp_path / "bundle")
    result = verify_bundle(bundle.path, policy=bundle.policy(), keep=EVERYTHING, now=made.NOW)
    shutil.rmtree(bundle.path)
    assert bytes_of(result) == bundle.contents


def test_a_file_swapped_between_listing_and_reading_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernseal.loader import verify

    bundle = made.make(tmp_path / "bundle")
    victim = bundle.path / "libkernseal.so"
    for swap in (Path.unlink, to_link, to_fifo, to_folder):
        bundle.restore()
        monkeypatch.setattr(verify, "list_tree", listing_then(swap, victim))
        with pytest.raises(VerificationFailed):
            verify_bundle(bundle.path, policy=bundle.policy(), now=made.NOW)


def bytes_of(result: VerifiedBundle) -> dict[str, bytes]:
    return {name: result.read(name) for name in result.files}


def swap_until(stop: object, bundle: made.Made, evil: Path) -> None:
    """Now and then the bundle is whole again, so that a verifier that looks twice could be caught."""
    chance = random.Random(7)
    bundle.restore()
    stage = bundle.path.parent / "stage"
    while not stop.is_set():  # type: ignore[attr-defined]
        name = chance.choice(VICTIMS)
        path = bundle.path / name
        for _ in range(chance.randrange(1, 4)):
            tamper(chance, path, evil / name, stage)
        put_back(path, bundle.pristine[name], stage)
        time.sleep(chance.random() * 0.006)


def tamper(chance: random.Random, path: Path, evil: Path, stage: Path) -> None:
    kind = chance.randrange(6)
    if kind == 0:
        shutil.copyfile(evil, stage)
        stage.replace(path)
    elif kind == 1:
        stage.unlink(missing_ok=True)
        stage.symlink_to(evil)
        stage.replace(path)
    elif kind == 2 and not path.is_symlink() and path.is_file():
        os.truncate(path, chance.randrange(4))
    elif kind == 3 and not path.is_symlink() and path.is_file():
        path.write_bytes(evil.read_bytes())
    elif kind == 4:
        path.unlink(missing_ok=True)
    elif kind == 5:
        stage.unlink(missing_ok=True)
        os.mkfifo(stage)
        stage.replace(path)


def put_back(path: Path, data: bytes, stage: Path) -> None:
    stage.unlink(missing_ok=True)
    stage.write_bytes(data)
    stage.replace(path)


def listing_then(swap: Callable[[Path], None], victim: Path) -> Callable[[int], object]:
    from kernseal.loader.safe_read import list_tree

    def listed(root: int) -> object:
        tree = list_tree(root)
        swap(victim)
        return tree

    return listed


def to_link(path: Path) -> None:
    copy = path.parent.parent / "copy"
    shutil.copyfile(path, copy)
    path.unlink()
    path.symlink_to(copy)


def to_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
