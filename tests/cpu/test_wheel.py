"""A bundle as a wheel: installed by pip without a network, found by the loader, verified byte for byte."""

from __future__ import annotations

import email
import json
import os
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest
import synthetic_bundle as made
from click.testing import CliRunner
from packaging.utils import parse_wheel_filename
from wheel.wheelfile import WheelFile

from kernseal.export import wheel
from kernseal.export.cli import main
from kernseal.loader import installed
from kernseal.loader.errors import InvalidArgument, Missing, Unsupported
from kernseal.loader.policy import Policy
from kernseal.loader.verify import verify_bundle
from kernseal.loader.violations import VerificationFailed

NAME = "kernseal_bundle_sm90a-1.2.3-py3-none-manylinux_2_17_x86_64.whl"
INFO = "kernseal_bundle_sm90a-1.2.3.dist-info"


@pytest.fixture
def bundle(tmp_path: Path) -> made.Made:
    result = made.make(tmp_path / "bundle")
    result.restore()
    return result


def policy_of(bundle: made.Made) -> Policy:
    return bundle.policy(with_keys=False)


def packed(bundle: made.Made, out: Path) -> Path:
    return wheel.write(bundle.path, out, policy_of(bundle)).path


def test_name_and_tags_say_any_python_and_the_librarys_platform(bundle: made.Made, tmp_path: Path) -> None:
    path = packed(bundle, tmp_path)
    assert path.name == NAME
    name, version, build, tags = parse_wheel_filename(path.name)
    assert (name, str(version), build) == ("kernseal-bundle-sm90a", "1.2.3", ())
    assert [str(tag) for tag in tags] == ["py3-none-manylinux_2_17_x86_64"]


def test_metadata_and_record_are_complete(bundle: made.Made, tmp_path: Path) -> None:
    with WheelFile(packed(bundle, tmp_path)) as archive:  # checks each file against RECORD as it reads
        contents = {name: archive.read(name) for name in archive.namelist()}
        recorded = {line.split(",")[0] for line in contents[f"{INFO}/RECORD"].decode().splitlines()}
    metadata = email.message_from_bytes(contents[f"{INFO}/METADATA"])
    assert recorded == set(contents)
    assert (metadata["Name"], metadata["Version"]) == ("kernseal-bundle-sm90a", "1.2.3")
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Dist"] is None
    for name in metadata.get_all("License-File") or []:
        assert f"{INFO}/licenses/{name}" in contents
    assert metadata.get_all("License-File") == ["flashinfer/LICENSE"]


def test_the_same_bundle_gives_the_same_wheel(
    bundle: made.Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = packed(bundle, tmp_path / "one").read_bytes()
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    os.utime(bundle.path / "kernseal.h", (1, 1))
    assert packed(bundle, tmp_path / "two").read_bytes() == first


def test_another_zlib_changes_no_file_and_no_hash_in_record(
    bundle: made.Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def inside(path: Path) -> dict[str, bytes]:
        with WheelFile(path) as archive:
            return {name: archive.read(name) for name in archive.namelist()}

    one = packed(bundle, tmp_path / "one")
    ours = zlib.compressobj
    monkeypatch.setattr(zlib, "compressobj", lambda level, *rest: ours(1, *rest))
    other = packed(bundle, tmp_path / "other")
    assert other.read_bytes() != one.read_bytes()
    assert inside(other) == inside(one)


def test_every_entry_is_deflated(bundle: made.Made, tmp_path: Path) -> None:
    with zipfile.ZipFile(packed(bundle, tmp_path)) as archive:
        assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_DEFLATED}


def test_nothing_in_it_is_code_of_python(bundle: made.Made, tmp_path: Path) -> None:
    names = zipfile.ZipFile(packed(bundle, tmp_path)).namelist()
    assert [name for name in names if name.endswith((".py", ".pth", ".pyc"))] == []
    assert {name.split("/")[0] for name in names} == {"kernseal_bundle_sm90a", INFO}


def test_a_bundle_that_does_not_verify_is_not_packed(bundle: made.Made, tmp_path: Path) -> None:
    policy = policy_of(bundle)
    (bundle.path / "kernseal.h").write_bytes(b"other")
    with pytest.raises(VerificationFailed, match=r"kernseal\.h"):
        wheel.write(bundle.path, tmp_path / "out", policy)
    with pytest.raises(VerificationFailed):
        wheel.write(bundle.path, tmp_path / "out", Policy())
    assert not (tmp_path / "out").exists()


def test_a_host_without_a_wheel_tag_is_refused_with_those_that_have_one(bundle: made.Made) -> None:
    from dataclasses import replace

    statement = verify_bundle(bundle.path, policy=policy_of(bundle)).statement
    with pytest.raises(Unsupported, match="'linux-riscv64': supported are linux-aarch64, linux-x86_64"):
        wheel.tag(replace(statement, host="linux-riscv64"))
    assert wheel.tag(replace(statement, host="linux-aarch64")) == "py3-none-manylinux_2_17_aarch64"


def test_a_retargeted_bundle_has_a_name_of_its_own(tmp_path: Path) -> None:
    bundle = made.make(tmp_path / "bundle", sm="sm_120a", retarget="sm_90a")
    path = packed(bundle, tmp_path)
    assert path.name.startswith("kernseal_bundle_sm120a_on_sm90a-1.2.3-")


FIND = """
import json, sys
from kernseal.loader.installed import find_bundle
from kernseal.loader.pins import read_pins
from kernseal.loader.policy import Policy
from kernseal.loader.verify import verify_bundle
from pathlib import Path
before = set(sys.modules)
path = find_bundle("sm_90a")
assert not [name for name in set(sys.modules) - before if name.startswith("kernseal_bundle")]
found = verify_bundle(path, policy=Policy(pins=read_pins(Path(sys.argv[1]))), sm="sm_90a")
print(json.dumps([str(path), dict(found.files), found.manifest_sha256]))
"""


def test_installed_in_a_fresh_environment_without_a_network_it_is_found_and_verifies(
    bundle: made.Made, tmp_path: Path
) -> None:
    path = packed(bundle, tmp_path / "wheels")
    lock = tmp_path / "sm_90a.lock.json"
    lock.write_text(json.dumps(made.pins(bundle.document)))
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = str(tmp_path / "venv/bin/python")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    subprocess.run(
        [*pip, "--find-links", str(path.parent), "kernseal-bundle-sm90a==1.2.3"], check=True, env=clean
    )
    site = next((tmp_path / "venv").glob("lib/python3*/site-packages"))
    # The loader comes from this environment; the bundle, as installed, from the other.
    seen = f"import sys; sys.path.append({str(site)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", seen + FIND, str(lock)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=clean,
    )
    assert done.returncode == 0, done.stderr
    where, files, manifest = json.loads(done.stdout)
    there = {p.relative_to(where).as_posix(): p.read_bytes() for p in Path(where).rglob("*") if p.is_file()}
    assert Path(where).is_relative_to(site)
    assert there == bundle.pristine
    assert files == {name: made.sha256(data) for name, data in bundle.contents.items()}
    assert manifest == made.sha256(bundle.pristine[made.MANIFEST])
    assert (Path(where) / "libkernseal.so").stat().st_mode & 0o777 == 0o755
    subprocess.run([python, "-m", "pip", "check"], check=True, env=clean, capture_output=True)


# --- finding -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for packages that only this test sees."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    return folder


def install(site: Path, package: str, points: str) -> None:
    info = site / f"{package}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{installed.GROUP}]\n{points}\n")


def test_a_bundle_that_is_not_installed_is_missing_and_those_that_are_are_named(site: Path) -> None:
    install(site, "one", "sm_90a-linux-x86_64 = kernseal_bundle_sm90a")
    assert installed.find_bundle("sm_90a") == site / "kernseal_bundle_sm90a" / "bundle"
    with pytest.raises(
        Missing, match=r"'sm_120a-linux-x86_64': no such.* installed are: sm_90a-linux-x86_64"
    ):
        installed.find_bundle("sm_120a")


def test_two_of_one_target_are_refused_not_chosen_from(site: Path) -> None:
    install(site, "one", "sm_90a-linux-x86_64 = kernseal_bundle_sm90a")
    install(site, "two", "sm_90a-linux-x86_64 = kernseal_bundle_other")
    with pytest.raises(InvalidArgument, match="2 are installed"):
        installed.find_bundle("sm_90a")


@pytest.mark.parametrize("value", ["os", "kernseal_bundle_x:f", "../../etc", "kernseal_bundle_x.y"])
def test_metadata_that_points_anywhere_else_is_refused(site: Path, value: str) -> None:
    install(site, "one", f"sm_90a-linux-x86_64 = {value}")
    with pytest.raises(InvalidArgument, match="supported is kernseal_bundle_"):
        installed.find_bundle("sm_90a")


def test_the_command_writes_the_wheel_and_says_its_hash(bundle: made.Made, tmp_path: Path) -> None:
    lock = tmp_path / "sm_90a.lock.json"
    lock.write_text(json.dumps(made.pins(bundle.document)))
    arguments = ["wheel", str(bundle.path), "--out", str(tmp_path / "out"), "--pins", str(lock), "--json"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["wheel"] == str(tmp_path / "out" / NAME)
    data = (tmp_path / "out" / NAME).read_bytes()
    assert report["sha256"] == made.sha256(data)
    whole = sum(map(len, bundle.pristine.values()))
    assert (report["files"], report["bytes"]) == (len(bundle.pristine), whole)
    assert report["compressed"] == len(data)
    told = CliRunner().invoke(main, arguments[:-1]).output
    assert f"{len(bundle.pristine)} files of {whole:,} bytes, {len(data):,} compressed" in told
