"""Tools: the pins agree with each other, an altered installation is named, and the cache can't hide it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kernseal.export import doctor, paths, toolchain, toolchain_files, wheel_pins
from kernseal.loader.errors import ToolchainInvalid

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
FILES = {"zz/core.py": b"import this\n", "zz/bin/compiler": b"\x7fELF compiler", "zz/a,b.txt": b"a comma\n"}


def recorded(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


class Site:
    """A site-packages with one made-up tool, `zz-tool 1.2`, as pip would have installed it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.info = folder / "zz_tool-1.2.dist-info"
        for path, data in FILES.items():
            self.write(path, data)
        self.info.mkdir()
        (self.info / "METADATA").write_text("Metadata-Version: 2.1\nName: zz-tool\nVersion: 1.2\n")
        (self.info / "INSTALLER").write_text("pip\n")
        self.record(FILES)

    def write(self, path: str, data: bytes) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_bytes(data)

    def record(self, files: dict[str, bytes]) -> None:
        rows = [f'"{path}",{recorded(data)},{len(data)}' for path, data in files.items()]
        rows += [
            "zz/__pycache__/core.cpython-311.pyc,,",
            "../../../bin/zz,,",
            f"{self.info.name}/INSTALLER,,",
        ]
        (self.info / "RECORD").write_text("\n".join([*rows, f"{self.info.name}/RECORD,,"]) + "\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path / "site")
    monkeypatch.syspath_prepend(str(made.folder))
    hashes = ((path, hashlib.sha256(data).hexdigest()) for path, data in FILES.items())
    wheel = {"sha256": "5" * 64, "digest": toolchain_files.tree_digest(hashes)}
    pin = toolchain.ToolPin("zz-tool", "1.2", "dsl", ("zz",), {"zz_tool-1.2-py3-none-any.whl": wheel})
    monkeypatch.setattr(toolchain, "load_pins", lambda: [pin])
    return made


@pytest.fixture
def inspect(site: Site, tmp_path: Path) -> Callable[[], list[toolchain.Tool]]:
    return lambda: toolchain.inspect_toolchain(tmp_path / "cache" / "toolchain.json")


def test_an_untouched_tool_is_one_of_the_pinned_wheels(
    site: Site, inspect: Callable[[], list[toolchain.Tool]]
) -> None:
    (tool,) = inspect()
    assert (tool.name, tool.version, tool.purl) == ("zz-tool", "1.2", "pkg:pypi/zz-tool@1.2")
    assert (tool.files, tool.wheel, tool.wheel_sha256) == (3, "zz_tool-1.2-py3-none-any.whl", "5" * 64)


def test_byte_code_and_what_installers_write_do_not_count(
    site: Site, inspect: Callable[[], list[toolchain.Tool]]
) -> None:
    before = inspect()
    site.write("zz/__pycache__/core.cpython-311.pyc", b"byte code")
    (site.info / "INSTALLER").write_text("uv\n")
    assert inspect() == before


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "cached"])
def test_an_altered_file_is_named_with_both_hashes(
    site: Site, inspect: Callable[[], list[toolchain.Tool]], warm: bool
) -> None:
    if warm:
        inspect()
    altered = FILES["zz/bin/compiler"].replace(b"comp", b"COMP")
    site.write("zz/bin/compiler", altered)
    with pytest.raises(ToolchainInvalid) as error:
        inspect()
    for part in (
        "zz-tool",
        "zz/bin/compiler",
        *(hashlib.sha256(d).hexdigest() for d in (altered, FILES["zz/bin/compiler"])),
    ):
        assert part in str(error.value)


def test_restoring_size_and_mtime_does_not_fool_the_cache(
    site: Site, inspect: Callable[[], list[toolchain.Tool]]
) -> None:
    inspect()
    file = site.folder / "zz/core.py"
    stat = file.stat()
    with file.open("r+b") as handle:
        handle.write(b"IMPORT")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    with pytest.raises(ToolchainInvalid, match=r"zz/core\.py: found sha256"):
        inspect()


def test_a_missing_file_is_named(site: Site, inspect: Callable[[], list[toolchain.Tool]]) -> None:
    (site.folder / "zz/core.py").unlink()
    with pytest.raises(ToolchainInvalid, match=r"zz/core\.py: found 'No such file or directory'"):
        inspect()


def test_a_file_that_no_wheel_brought_is_named(
    site: Site, inspect: Callable[[], list[toolchain.Tool]]
) -> None:
    inspect()
    site.write("zz/bin/sitecustomize.so", b"stranger")
    with pytest.raises(ToolchainInvalid, match=r"zz from no pinned wheel: zz/bin/sitecustomize\.so"):
        inspect()


def test_a_record_rewritten_to_match_altered_bytes_is_no_pinned_wheel(
    site: Site, inspect: Callable[[], list[toolchain.Tool]]
) -> None:
    inspect()
    site.write("zz/core.py", b"import that\n")
    site.record({**FILES, "zz/core.py": b"import that\n"})
    with pytest.raises(ToolchainInvalid, match="that of no pinned wheel"):
        inspect()


def test_another_version_is_refused(site: Site, inspect: Callable[[], list[toolchain.Tool]]) -> None:
    metadata = site.info / "METADATA"
    metadata.write_text(metadata.read_text().replace("1.2", "1.3"))
    with pytest.raises(ToolchainInvalid, match=r"zz-tool: found version 1\.3, expected 1\.2"):
        inspect()


def test_a_missing_record_is_refused(site: Site, inspect: Callable[[], list[toolchain.Tool]]) -> None:
    (site.info / "RECORD").unlink()
    with pytest.raises(ToolchainInvalid, match="RECORD is missing"):
        inspect()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"schema": 0, "digests": {}}', b"\xff\xfe"])
def test_a_damaged_cache_is_an_empty_one(
    site: Site, inspect: Callable[[], list[toolchain.Tool]], tmp_path: Path, content: bytes
) -> None:
    before = inspect()
    (tmp_path / "cache" / "toolchain.json").write_bytes(content)
    assert inspect() == before
    assert json.loads((tmp_path / "cache" / "toolchain.json").read_bytes())["schema"] == 1


def test_a_second_look_reads_no_file(
    site: Site, inspect: Callable[[], list[toolchain.Tool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = inspect()

    def refuse(path: Path) -> str:
        raise AssertionError(f"{path} was read")

    monkeypatch.setattr(toolchain_files, "sha256_file", refuse)
    assert inspect() == before


def test_pyproject_locks_and_pins_name_the_same_releases() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {re.sub(r"\[.*\]", "", r) for r in project["optional-dependencies"]["compilers"] if "==" in r}
    lock = wheel_pins.LOCK.read_text()
    pins = toolchain.load_pins()
    assert wanted <= {f"{pin.name}=={pin.version}" for pin in pins}
    for pin in pins:
        hashes = wheel_pins.locked_hashes(lock, pin.name, pin.version)
        assert pin.wheels
        assert {wheel["sha256"] for wheel in pin.wheels.values()} <= hashes


def test_locks_hold_hashed_releases_and_nothing_else() -> None:
    for lock in sorted((paths.manifests() / "toolchain").glob("*.lock.txt")):
        entries = re.split(
            r"\n(?=[a-z])", re.sub(r"^#.*\n", "", lock.read_text(), flags=re.MULTILINE).strip()
        )
        assert len(entries) > 5
        for entry in entries:
            assert re.fullmatch(
                r"[a-z0-9-]+==[^ ]+( ; [^\\]+)? \\(\n    --hash=sha256:[0-9a-f]{64}( \\)?)+", entry
            ), entry


def test_one_dsl_compiler_is_locked() -> None:
    assert re.findall(r"^nvidia-cutlass-dsl-libs-cu\d+", wheel_pins.LOCK.read_text(), re.MULTILINE) == [
        "nvidia-cutlass-dsl-libs-cu13"
    ]


def test_the_installed_tools_are_the_pinned_ones() -> None:
    tools = toolchain.inspect_toolchain()
    assert [tool.name for tool in tools] == [pin.name for pin in toolchain.load_pins()]
    assert {tool.role for tool in tools} >= {"dsl", "assembler", "host-compiler"}
    assert sum(tool.files for tool in tools) > 10_000


def test_the_tools_are_where_they_are_looked_for() -> None:
    version = subprocess.run(
        [toolchain.ptxas_path(), "--version"], capture_output=True, text=True, check=True
    )
    assert "V13.4.59" in version.stdout
    zig = subprocess.run([*toolchain.zig_argv(), "version"], capture_output=True, text=True, check=True)
    assert zig.stdout.strip() == "0.17.1"
    assert toolchain.dsl_runtime_path().parent.parent.name == "cu13"


FAKE_DRIVER = "int cuDriverGetVersion(int *v) { *v = 12080; return 0; }\n"
SAY_COMPILER = """
import sys
from kernseal.export.toolchain import bind_dsl
bind_dsl()
bind_dsl()
import cutlass.cute
print(sys.modules["cutlass._mlir._mlir_libs._cutlass_ir"].__file__)
"""


@pytest.mark.slow
def test_the_dsl_takes_the_pinned_compiler_whatever_the_driver(tmp_path: Path) -> None:
    """A CUDA 12 driver makes the DSL, left alone, choose another compiler or refuse to be imported."""
    (tmp_path / "driver.c").write_text(FAKE_DRIVER)
    library = str(tmp_path / "libcuda.so.1")
    environment = {**os.environ, "ZIG_LOCAL_CACHE_DIR": str(tmp_path), "ZIG_GLOBAL_CACHE_DIR": str(tmp_path)}
    flags = ["-shared", "-O2", "-fno-sanitize=all", "-o", library]
    compile_driver = [*toolchain.zig_argv(), "cc", *flags, str(tmp_path / "driver.c")]
    subprocess.run(compile_driver, check=True, env=environment)
    with_driver = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    alone = subprocess.run(
        [sys.executable, "-c", "import cutlass"], capture_output=True, text=True, env=with_driver
    )
    assert "None of the installed toolkit flavors (cu13)" in alone.stderr
    bound = subprocess.run(
        [sys.executable, "-c", SAY_COMPILER], capture_output=True, text=True, env=with_driver
    )
    assert bound.stdout.strip() == str(toolchain.dsl_compiler_path()), bound.stderr


def test_doctor_is_content_here_and_says_what_is_wrong_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [check for check in doctor.doctor() if not check.ok] == []
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KERNSEAL_CACHE", str(tmp_path / "file" / "cache"))
    (failed,) = [check for check in doctor.doctor() if not check.ok]
    assert failed.name == "cache"
    assert "KERNSEAL_CACHE" in failed.hint


def test_doctor_reports_a_broken_tool(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNSEAL_CACHE", str(tmp_path / "cache"))
    site.write("zz/core.py", b"")
    (failed,) = [check for check in doctor.doctor() if not check.ok]
    assert failed.name == "tools"
    assert "zz/core.py" in failed.detail
