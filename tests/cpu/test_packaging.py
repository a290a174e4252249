"""What `pip install .` brings: the mapped packages with their data, a loader that needs nothing of the builder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAPPED = ("abi", "export", "kernels", "loader", "loader/integrations", "manifests", "patches")
TOP = "loader/package"
"""What `kernseal` itself is."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the tracked files, in a copy: the checkout stays clean and its leftovers stay out."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listing.stdout.split("\0")):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        ".",
    ]
    subprocess.run(build, cwd=source, check=True)
    (made,) = out.glob("*.whl")
    return made


def tracked(folder: str) -> set[str]:
    listing = subprocess.run(
        ["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {line for line in listing.stdout.splitlines() if not Path(line).name.startswith(".")}


@pytest.mark.parametrize("folder", MAPPED)
def test_every_file_of_a_mapped_folder_is_in_the_wheel(wheel: Path, folder: str) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    inner = [f"{other}/" for other in (*MAPPED, TOP) if other.startswith(f"{folder}/")]
    package = f"kernseal/{Path(folder).name}"
    files = {path for path in tracked(folder) if not path.startswith(tuple(inner))}
    wanted = {f"{package}/{Path(path).relative_to(folder)}" for path in files}
    assert wanted
    assert wanted - names == set()
    assert not any(f"kernseal/{name}" in found for name in inner for found in names)


def test_the_wheel_has_nothing_else(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    packages = {
        name.split("/")[1] for name in zipfile.ZipFile(wheel).namelist() if name.startswith("kernseal/")
    }
    assert tops == {"kernseal", "kernseal-0.1.0.dist-info"}
    assert packages == {*(Path(folder).name for folder in MAPPED), "__init__.py", "py.typed"}


def test_the_wheel_carries_the_licence_and_its_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    assert "Apache License" in archive.read("kernseal-0.1.0.dist-info/licenses/LICENSE").decode()
    assert (
        "kernseal = kernseal.export.command:main"
        in archive.read("kernseal-0.1.0.dist-info/entry_points.txt").decode()
    )


def test_the_loader_needs_only_cffi_and_a_signature_library(wheel: Path) -> None:
    metadata = zipfile.ZipFile(wheel).read("kernseal-0.1.0.dist-info/METADATA").decode()
    required = [
        line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line
    ]
    assert sorted(line.split()[1].split(">")[0] for line in required) == ["cffi", "securesystemslib[crypto]"]


IMPORT_ALL = """
import importlib, pkgutil, sys
import kernseal, kernseal.loader
assert callable(kernseal.open)
for module in pkgutil.iter_modules(kernseal.loader.__path__, "kernseal.loader."):
    importlib.import_module(module.name)
assert "site-packages" in kernseal.loader.__file__, kernseal.loader.__file__
print(sorted({name.split(".")[0] for name in sys.modules} & {"torch", "yaml", "click", "jinja2", "cutlass"}))
print(sorted(name for name in sys.modules if name.startswith("kernseal.export")))
"""


def test_the_loader_imports_from_a_fresh_environment_without_the_builder(wheel: Path, tmp_path: Path) -> None:
    """The wheel and the loader's own dependencies (as locked) are all that is installed."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = str(tmp_path / "venv/bin/python")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    wanted = ("cffi", "cryptography", "pycparser", "securesystemslib", "typing-extensions")
    entries = (ROOT / "manifests/toolchain/export.lock.txt").read_text().replace("\\\n", "\\\0").splitlines()
    lines = [entry.replace("\\\0", "\\\n") for entry in entries if entry.split("==")[0] in wanted]
    (tmp_path / "loader.txt").write_text("\n".join(lines) + "\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--require-hashes", "-r", str(tmp_path / "loader.txt")], check=True, env=clean)
    subprocess.run([*pip, str(wheel)], check=True, env=clean)
    subprocess.run([python, "-m", "pip", "check"], check=True, env=clean)
    run = [python, "-I", "-c", IMPORT_ALL]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, env=clean)
    assert done.stdout.splitlines() == ["[]", "[]"], done.stderr
    command = [str(tmp_path / "venv/bin/kernseal"), "verify-bundle", "dist"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=clean)
    words = (
        "kernseal: unsupported: No module named 'click'; the command needs kernseal[export]: from a checkout,"
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(words) and done.stderr.count("\n") == 1
    done = subprocess.run([*command, "--json"], cwd=tmp_path, capture_output=True, text=True, env=clean)
    assert (done.returncode, json.loads(done.stdout)["error"], done.stderr) == (2, "unsupported", "")


def test_an_old_python_is_told_so_and_nothing_is_made(tmp_path: Path) -> None:
    code = (
        "import sys, runpy; sys.version_info = (3, 9, 1, 'final', 0); sys.argv = ['environment.py'];"
        f"runpy.run_path({str(ROOT / '.ci/environment.py')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "kernseal needs Python 3.10 to 3.13" in done.stderr
    assert "is 3.9" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_make_names_its_commands_and_asks_for_an_sm() -> None:
    listed = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    for command in (
        "artifacts",
        "test",
        "lint",
        "example-cpp",
        "example-rust",
        "gate",
        "bench",
        "lock",
        "clean",
    ):
        assert f"\n  {command} " in listed.stdout
    refused = subprocess.run(
        ["make", "-o", "nothing", "artifacts", "SM="], cwd=ROOT, capture_output=True, text=True
    )
    assert refused.returncode != 0
    assert "which SM?" in refused.stderr


def test_no_page_installs_kernseal_from_an_index_that_does_not_have_it() -> None:
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    assert [page.name for page in pages if re.search(r"pip install ['\"]?kernseal", page.read_text())] == []
