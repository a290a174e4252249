"""Two builds that differ in everything that must not matter give the same bundle, byte for byte."""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from builds import PACKED, POOLED_HKV, ROOT, signing_key

from kernseal.export import source

PACKAGES = ("abi", "export", "kernels", "loader", "manifests", "patches")


def checkout(where: Path, seed: int) -> Path:
    """A clone of this tree as it is, with links as an installed namespace and scrambled times."""
    where.mkdir(parents=True)
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(where / "repo")], check=True)
    clock = random.Random(seed)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, where / "repo" / name, dirs_exist_ok=True)
        for path in sorted((where / "repo" / name).rglob("*")):
            moment = clock.randrange(10**9)
            os.utime(path, (moment, moment))
    links = where / "links" / "kernseal"
    links.mkdir(parents=True)
    for name in PACKAGES:
        (links / name).symlink_to(where / "repo" / name)
    return where


def on_host(name: str) -> list[str]:
    """What a command starts with to run on a host of that name, or nothing where this user may not name one."""
    prefix = [
        "unshare",
        "--user",
        "--uts",
        "--map-root-user",
        "sh",
        "-c",
        f'hostname {name} && exec "$@"',
        "sh",
    ]
    try:
        seen = subprocess.run([*prefix, "uname", "-n"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return []
    return prefix if seen == f"{name}\n" else []


def build(
    where: Path, jobs: int, order: list[str], environment: dict[str, str], prefix: Sequence[str] = ()
) -> dict[str, bytes]:
    """Run the build there, with a cache of its own, and return the bundle's files."""
    (where / "home").mkdir()
    (where / "tmp").mkdir()
    cached = where / "cache" / "wheels" / source.upstream().sha256
    shutil.copytree(source.fetch_wheel(source.upstream()).parent, cached)
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(where / "links"),
        "HOME": str(where / "home"),
        "TMPDIR": str(where / "tmp"),
        "KERNSEAL_CACHE": str(where / "cache"),
        "KERNSEAL_SIGNING_KEY": (ROOT / "build" / "test-cache" / "tests.pem").read_text(),
        **environment,
    }
    command = [
        *prefix,
        sys.executable,
        "-m",
        "kernseal.export.cli",
        "build",
        "--sm",
        "90",
        "--jobs",
        str(jobs),
        "--no-cache",
        "--quiet",
    ]
    for variant in order:
        command += ["--variant", variant]
    done = subprocess.run(command, cwd=where, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    root = where / "dist" / "sm_90a-linux-x86_64"
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


@pytest.mark.slow
def test_two_users_two_folders_two_times_any_order_and_parallelism_give_the_same_bundle(
    tmp_path: Path,
) -> None:
    signing_key()
    one = build(
        checkout(tmp_path / "one", 1),
        1,
        [PACKED, POOLED_HKV],
        {"LANG": "C", "TZ": "UTC", "PYTHONHASHSEED": "1", "LOGNAME": "ada"},
    )
    two = build(
        checkout(tmp_path / "a longer folder" / "näme", 2),
        2,
        [POOLED_HKV, PACKED],
        {
            "LANG": "C.UTF-8",
            "TZ": "Asia/Kolkata",
            "PYTHONHASHSEED": "77",
            "LOGNAME": "grace",
            "SOURCE_DATE_EPOCH": "1",
        },
    )
    assert one.keys() == two.keys()
    assert [name for name in one if one[name] != two[name]] == []
    assert {
        "manifest.json",
        "manifest.dsse.json",
        "libkernseal.so",
        f"cubin/gdn_prefill/{PACKED}.cubin",
    } <= one.keys()


@pytest.mark.slow
def test_no_path_user_host_or_time_of_the_build_is_in_any_file(tmp_path: Path) -> None:
    signing_key()
    where = checkout(tmp_path / "unmistakable", 3)
    host = on_host("unmistakable-host")
    files = build(where, 2, [PACKED], {"LANG": "C", "LOGNAME": "unmistakable-user"}, host)
    files["the signed statement"] = base64.b64decode(json.loads(files["manifest.dsse.json"])["payload"])
    for name, data in files.items():
        for trace in (b"unmistakable", str(Path.home()).encode() + b"/", b"site-packages"):
            assert trace not in data, (name, trace)
    if not host:
        pytest.skip("this user may not name a host (unshare): everything but the host's name was looked for")
