"""``installed``: every name of FlashInfer's functions is kernseal's inside, and what it was outside."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from kernseal.export import source  # noqa: E402
from kernseal.loader import flashinfer, flashinfer_jit, serving  # noqa: E402
from kernseal.loader.errors import InvalidArgument, JitRefused, Missing, NotPrepared, Unsupported  # noqa: E402
from kernseal.loader.flashinfer import install, installed, uninstall  # noqa: E402

DEVICE = 5
NO_DSL = "raise ModuleNotFoundError(\"No module named 'cutlass'\", name='cutlass')\n"
FILES = {
    "__init__.py": "__version__ = '9.8.7'\nfrom .add import add as add\nfrom . import jit, users\n",
    "add.py": "def add(a, b):\n    return f'theirs {a}+{b}'\n",
    "users.py": "from .add import add as plus\ndef use(a, b):\n    return plus(a, b)\n",
    "late.py": "from .add import add\n",
    "compiled.py": f"{NO_DSL}def mul(a, b):\n    pass\n",
    "compiled_user.py": "from .compiled import mul as times\n",
    "broken.py": "import flashinfer.nothing\n",
    "lacking.py": "import a_library_that_is_not_there\n",
    "unloadable.py": "raise ImportError('libcuda.so.1: cannot open', name='cutlass._mlir')\n",
    "failing.py": "raise RuntimeError('cutlass found no device')\n",
    "optional/__init__.py": "try:\n    from .dsl import mul\nexcept ImportError:\n    mul = None\n",
    "optional/dsl.py": f"{NO_DSL}def mul(a, b):\n    pass\n",
    "tasks/__init__.py": "from .helpers.dsl import nothing\nfrom .metadata import mul\n",
    "tasks/helpers/__init__.py": "",
    "tasks/helpers/dsl.py": f"{NO_DSL}nothing = 0\n",
    "tasks/metadata.py": "def mul(a, b):\n    pass\n",
    "jit/__init__.py": "from . import core\n",
    "jit/core.py": """
class JitSpec:
    def __init__(self, name, compiled=None):
        self.name, self.compiled = name, compiled
    def build_and_load(self):
        if self.compiled is None:
            self._timed_build()
        return self.compiled
    def _timed_build(self):
        self.build()
class JitSpecNvcc(JitSpec):
    def build(self):
        self.compiled = f"{self.name} compiled now"
""",
    "norm.py": """
import subprocess
from .jit.core import JitSpecNvcc
def rmsnorm(compiled=None):
    return JitSpecNvcc("norm", compiled).build_and_load()
def build():
    return JitSpecNvcc("norm").build()
def start(*command):
    return subprocess.run(command, check=True, capture_output=True).returncode
def call(function):
    return function()
""",
}


def add(a: int, b: int, *, places: int = 0) -> str:
    if a < 0:
        raise Unsupported(f"a is {a}")
    if b < 0:
        raise InvalidArgument(f"b is {b}")
    return f"ours {a}+{b} {places}"


def mul(a: int, b: int) -> str:
    return f"ours {a}*{b}"


REPLACES = {"flashinfer": {"add": add}, "flashinfer.add": {"add": add}}
WITH_COMPILED = {
    **REPLACES,
    "flashinfer": {"add": add, "mul": mul},
    "flashinfer.compiled": {"mul": mul, "times": mul},
}
IN_PACKAGES = {
    "flashinfer": {"add": add, "mul": mul},
    "flashinfer.tasks": {"mul": mul},
    "flashinfer.tasks.metadata": {"mul": mul},
    "flashinfer.optional": {"mul": mul},
    "flashinfer.optional.dsl": {"mul": mul},
}


@pytest.fixture
def replaces() -> Mapping[str, Mapping[str, Callable[..., Any]]]:
    return REPLACES


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaces: Mapping[str, Any]) -> Iterator[None]:
    """A small flashinfer, and what replaces its functions."""
    folder = tmp_path / "flashinfer"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(flashinfer, "_replacements", lambda: replaces)
    monkeypatch.setattr(serving, "_served", {})
    yield
    assert flashinfer._installations == []
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        monkeypatch.delitem(sys.modules, name)


def bundle(version: str = "9.8.7") -> Any:
    uris = [f"pkg:pypi/flashinfer-python@{version}#some/file", f"pkg:pypi/flashinfer-python@{version}"]
    definition = {"resolvedDependencies": [{"uri": uri} for uri in uris]}
    document = {"predicate": {"buildDefinition": definition}}
    return SimpleNamespace(statement=SimpleNamespace(document=document))


def module(name: str) -> Any:
    return importlib.import_module(name)


def names() -> dict[str, dict[str, object]]:
    """Everything that FlashInfer's modules hold, by identity."""
    return {
        name: dict(vars(found))
        for name, found in sys.modules.items()
        if name.partition(".")[0] == "flashinfer"
    }


def test_every_name_is_replaced_and_restored() -> None:
    package = module("flashinfer")
    before = names()
    opened = bundle()
    with installed(opened, device=DEVICE, at_least="ran"):
        served = serving.served_by(DEVICE)
        assert served.bundle is opened and served.at_least == "ran"
        assert package.add is module("flashinfer.add").add is package.users.plus is add
        assert package.users.use(1, 2) == "ours 1+2 0"
    assert names() == before
    with pytest.raises(NotPrepared):
        serving.served_by(DEVICE)
    assert package.users.use(1, 2) == "theirs 1+2"


def test_a_module_that_is_imported_inside_is_restored_as_well() -> None:
    with installed(bundle(), device=DEVICE):
        assert module("flashinfer.late").add is add
    assert module("flashinfer.late").add(1, 2) == "theirs 1+2"


def test_an_error_inside_restores() -> None:
    with pytest.raises(ZeroDivisionError), installed(bundle(), device=DEVICE):
        raise ZeroDivisionError
    assert module("flashinfer").add(1, 2) == "theirs 1+2"


def test_installations_nest_and_the_innermost_counts() -> None:
    package, before = module("flashinfer"), names()
    outer, inner = bundle(), bundle()
    with installed(outer, device=DEVICE, places=1):
        with installed(inner, device=DEVICE), installed(inner, device=DEVICE, places=2):
            assert package.users.use(1, 2) == "ours 1+2 2"
            assert serving.served_by(DEVICE).bundle is inner
        assert package.users.use(1, 2) == package.add(1, 2) == "ours 1+2 1"
        assert serving.served_by(DEVICE).bundle is outer
        assert package.add(1, 2, places=7) == "ours 1+2 7"
    assert names() == before


def test_install_and_uninstall_without_a_block() -> None:
    install(bundle(), device=DEVICE)
    assert module("flashinfer").add is add
    uninstall()
    assert module("flashinfer").add is not add
    with pytest.raises(InvalidArgument, match="nothing is installed"):
        uninstall()


def test_what_a_bundle_lacks_raises_unless_it_may_fall_through() -> None:
    package = module("flashinfer")
    with installed(bundle(), device=DEVICE), pytest.raises(Unsupported, match="a is -1"):
        package.users.use(-1, 2)
    with installed(bundle(), device=DEVICE, missing="fall_through", places=3):
        assert package.users.use(-1, 2) == "theirs -1+2"
        assert package.users.use(1, 2) == "ours 1+2 3"
        with pytest.raises(InvalidArgument, match="b is -2"):
            package.users.use(1, -2)


def test_bad_arguments_change_nothing() -> None:
    module("flashinfer")
    before = names()
    with pytest.raises(InvalidArgument, match="missing is 'ignore'; it must be raise or fall_through"):
        install(bundle(), device=DEVICE, missing="ignore")
    with pytest.raises(InvalidArgument, match="jit is 'never'; it must be refuse or allow"):
        install(bundle(), device=DEVICE, jit="never")
    with pytest.raises(InvalidArgument, match="digits, size: no function that is installed takes it"):
        install(bundle(), device=DEVICE, size=1, digits=2)
    assert names() == before


COMPILED_NOW = "norm compiled now"


def test_what_is_not_replaced_is_not_compiled_either() -> None:
    """Only the functions that kernseal replaces were kept from compiling."""
    norm = module("flashinfer.norm")
    core = module("flashinfer.jit.core")
    before = dict(vars(core.JitSpec)), dict(vars(core.JitSpecNvcc))
    with installed(bundle(), device=DEVICE):
        for build in (norm.rmsnorm, norm.build):
            with pytest.raises(
                JitRefused, match=r"about to compile norm, .* install with jit='allow'"
            ) as caught:
                build()
            assert caught.value.module == "norm" and isinstance(caught.value, Unsupported)
        assert norm.rmsnorm("compiled ahead of time") == "compiled ahead of time"
    assert (dict(vars(core.JitSpec)), dict(vars(core.JitSpecNvcc))) == before
    assert norm.rmsnorm() == COMPILED_NOW


def test_every_thread_is_kept_from_compiling() -> None:
    norm = module("flashinfer.norm")
    with ThreadPoolExecutor(4) as threads:
        with installed(bundle(), device=DEVICE):
            for ended in [threads.submit(norm.rmsnorm) for _ in range(8)]:
                assert isinstance(ended.exception(), JitRefused)
        assert {ended.result() for ended in [threads.submit(norm.rmsnorm) for _ in range(8)]} == {
            COMPILED_NOW
        }


@pytest.mark.parametrize(
    ("missing", "jit", "compiles"),
    [
        ("raise", None, False),
        ("raise", "allow", True),
        ("fall_through", None, True),
        ("fall_through", "refuse", False),
    ],
)
def test_what_falls_through_may_compile_unless_it_is_refused(
    missing: str, jit: str | None, compiles: bool
) -> None:
    norm = module("flashinfer.norm")
    with installed(bundle(), device=DEVICE, missing=missing, jit=jit):
        if compiles:
            assert norm.rmsnorm() == COMPILED_NOW
        else:
            with pytest.raises(JitRefused):
                norm.rmsnorm()


def test_the_innermost_block_says_whether_to_compile() -> None:
    norm = module("flashinfer.norm")
    with installed(bundle(), device=DEVICE):
        with installed(bundle(), device=DEVICE, jit="allow"):
            assert norm.rmsnorm() == COMPILED_NOW
            with installed(bundle(), device=DEVICE), pytest.raises(JitRefused):
                norm.rmsnorm()
            assert norm.rmsnorm() == COMPILED_NOW
        with pytest.raises(JitRefused):
            norm.rmsnorm()


def test_no_compiler_is_started_for_flashinfer(tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    norm = module("flashinfer.norm")
    with installed(bundle(), device=DEVICE):
        with pytest.raises(JitRefused) as caught:
            norm.start(nvcc, "-c", "kernel.cu")
        assert caught.value.module == "flashinfer.norm (by nvcc)"
        with pytest.raises(JitRefused):
            norm.call(lambda: os.system(f"{nvcc} -c kernel.cu"))
        assert norm.start(nvcc, "--version") == norm.start("true") == 0
        assert subprocess.run([nvcc, "-c", "kernel.cu"], check=True).returncode == 0  # not FlashInfer's
    assert norm.start(nvcc, "-c", "kernel.cu") == 0


def test_no_compiler_in_the_process_works_for_flashinfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in_process.py").write_text(
        "class Compiler:\n    def compile(self):\n        return 'code'\n"
    )
    places = (
        ("X", "in_process", "Compiler", "compile"),
        ("Y", "a_compiler_that_is_not_there", None, "compile"),
    )
    monkeypatch.setattr(flashinfer_jit, "IN_PROCESS", places)
    norm, compiler = module("flashinfer.norm"), module("in_process").Compiler()
    with installed(bundle(), device=DEVICE):
        with pytest.raises(JitRefused, match=r"flashinfer\.norm \(by X\)"):
            norm.call(compiler.compile)
        assert compiler.compile() == "code"
    assert norm.call(compiler.compile) == "code"
    monkeypatch.delitem(sys.modules, "in_process")


def test_a_flashinfer_that_builds_elsewhere_is_refused_unless_it_may_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = module("flashinfer.jit.core")
    before = names()
    monkeypatch.delattr(core.JitSpecNvcc, "build")
    timed_build = core.JitSpec._timed_build
    with pytest.raises(Unsupported, match=r"flashinfer\.jit\.core: .*build.*jit='allow' installs without"):
        install(bundle(), device=DEVICE)
    assert names() == before and core.JitSpec._timed_build is timed_build
    with installed(bundle(), device=DEVICE, jit="allow"):
        assert module("flashinfer").add is add


def test_the_pinned_flashinfer_builds_where_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of build goes through one method, and CuTe DSL and NVRTC have those that are guarded."""
    monkeypatch.undo()
    with zipfile.ZipFile(source.fetch_wheel(source.upstream())) as wheel:
        core = ast.parse(wheel.read("flashinfer/jit/core.py"))
        texts = [wheel.read(name).decode() for name in wheel.namelist() if name.startswith("flashinfer/jit/")]
    classes = {node.name: node for node in core.body if isinstance(node, ast.ClassDef)}
    for _, name, method in flashinfer_jit.BUILDS:
        assert method in [node.name for node in classes[name].body if isinstance(node, ast.FunctionDef)]
    assert "self._timed_build()" in ast.unparse(classes["JitSpec"])
    assert sum(text.count("def _timed_build(") for text in texts) == 1
    for _, name, owner, attribute in flashinfer_jit.IN_PROCESS:
        found = pytest.importorskip(name, reason=f"{name} is not installed")
        assert callable(getattr(found if owner is None else getattr(found, owner), attribute))


def test_another_version_is_refused_unless_allowed() -> None:
    words = "flashinfer is 9.8.7; the bundle's kernels are from 0.7.4; any_version=True accepts it"
    with pytest.raises(Unsupported, match=words):
        install(bundle("0.7.4"), device=DEVICE)
    with installed(bundle("0.7.4"), device=DEVICE, any_version=True):
        assert module("flashinfer").add is add


def test_no_flashinfer_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(Missing, match="flashinfer: cannot be imported"):
        install(bundle(), device=DEVICE)


@pytest.mark.parametrize("replaces", [{**REPLACES, "flashinfer.users": {"use": add}}])
def test_one_function_may_take_the_place_of_two() -> None:
    package = module("flashinfer")
    before = names()
    with installed(bundle(), device=DEVICE), installed(bundle(), device=DEVICE, places=4):
        assert package.users.use(1, 2) == package.add(1, 2) == "ours 1+2 4"
    assert names() == before


@pytest.mark.parametrize("replaces", [{**REPLACES, "flashinfer.users": {"nothing": mul}}])
def test_a_function_that_is_not_there_is_refused_and_nothing_stays_replaced() -> None:
    module("flashinfer")
    before = names()
    with pytest.raises(Unsupported, match=r"flashinfer.users has no nothing"):
        install(bundle(), device=DEVICE)
    assert names() == before


@pytest.mark.parametrize("replaces", [{"flashinfer.gone": {"mul": mul}}, {"flashinfer.broken": {"mul": mul}}])
def test_a_module_that_is_not_there_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"flashinfer.*No module named 'flashinfer\.(gone|nothing)'"):
        install(bundle(), device=DEVICE)


@pytest.mark.parametrize("replaces", [WITH_COMPILED])
def test_a_module_whose_compiler_is_not_there_has_a_stand_in_meanwhile() -> None:
    package = module("flashinfer")
    before = names()
    with pytest.raises(ModuleNotFoundError, match="cutlass"):
        module("flashinfer.compiled")
    with installed(bundle(), device=DEVICE, missing="fall_through"):
        assert module("flashinfer.compiled").mul(2, 3) == package.mul(2, 3) == "ours 2*3"
        assert package.compiled.times is mul
        with installed(bundle(), device=DEVICE):
            assert package.mul(2, 3) == "ours 2*3"
    assert names() == before
    with pytest.raises(ModuleNotFoundError, match="cutlass"):
        module("flashinfer.compiled")


@pytest.mark.parametrize("replaces", [IN_PACKAGES])
@pytest.mark.parametrize("missing", flashinfer.MISSING)
def test_a_package_whose_compiler_is_not_there_has_a_stand_in_meanwhile(missing: str) -> None:
    package = module("flashinfer")
    assert module("flashinfer.optional").mul is None
    with pytest.raises(ModuleNotFoundError, match="cutlass"):
        module("flashinfer.tasks.metadata")
    before = names()
    with installed(bundle(), device=DEVICE, missing=missing):
        assert package.mul is package.tasks.mul is package.optional.mul is mul
        assert module("flashinfer.tasks.metadata").mul is module("flashinfer.optional.dsl").mul is mul
        assert package.tasks.metadata is module("flashinfer.tasks.metadata")
        with installed(bundle(), device=DEVICE):
            assert package.tasks.mul(2, 3) == package.optional.mul(2, 3) == "ours 2*3"
        assert package.tasks.metadata.mul(2, 3) == "ours 2*3"
    assert names() == before
    with pytest.raises(ModuleNotFoundError, match="cutlass"):
        module("flashinfer.tasks.metadata")


@pytest.mark.parametrize("replaces", [WITH_COMPILED])
def test_a_module_that_was_imported_with_a_stand_in_is_not_there_afterwards() -> None:
    module("flashinfer")
    before = names()
    with installed(bundle(), device=DEVICE):
        assert module("flashinfer.compiled_user").times is mul
        with installed(bundle(), device=DEVICE):
            pass
        assert module("flashinfer.compiled_user").times is mul
    assert names() == before
    with pytest.raises(ModuleNotFoundError, match="cutlass"):
        module("flashinfer.compiled_user")


@pytest.mark.parametrize(
    ("replaces", "error", "words"),
    [
        ({"flashinfer.lacking": {"mul": mul}}, Missing, "flashinfer.lacking: .*a_library_that_is_not_there"),
        ({"flashinfer.unloadable": {"mul": mul}}, Missing, "flashinfer.unloadable: .*libcuda.so.1"),
        ({"flashinfer.failing": {"mul": mul}}, RuntimeError, "cutlass found no device"),
    ],
)
def test_only_a_compiler_that_is_not_there_is_done_without(error: type[Exception], words: str) -> None:
    module("flashinfer")
    before = names()
    with pytest.raises(error, match=words):
        install(bundle(), device=DEVICE)
    assert names() == before


def test_every_op_replaces_what_the_pinned_flashinfer_has_with_the_same_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    with zipfile.ZipFile(source.fetch_wheel(source.upstream())) as wheel:
        for name, functions in flashinfer._replacements().items():
            path = name.replace(".", "/")
            if f"{path}/__init__.py" in wheel.namelist():  # a package imports what one of its modules defines
                continue
            tree = ast.parse(wheel.read(f"{path}.py"))
            defined = {node.name: node.args for node in tree.body if isinstance(node, ast.FunctionDef)}
            for attribute, function in functions.items():
                theirs = [a.arg for a in (*defined[attribute].args, *defined[attribute].kwonlyargs)]
                ours = list(inspect.signature(function).parameters)
                assert ours[: len(theirs)] == theirs, f"{name}.{attribute}"
