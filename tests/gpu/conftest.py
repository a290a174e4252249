"""Which bundles the GPU tests run on, why a test is skipped, and the report of what was measured."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu.bundles import ALL, BUNDLES, folder, open_by_name
from gpu.provenance import provenance

_measured: dict[str, Any] = {}
_outcomes: dict[str, Counter[str]] = {}
"""How the tests of each file ended."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def gpu() -> Any:
    """torch, on a machine whose GPU 0 is an SM 9.0."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    capability = torch.cuda.get_device_capability(0)
    if capability != (9, 0):
        pytest.skip(f"GPU 0 is SM {capability[0]}.{capability[1]}; these bundles are for SM 9.0")
    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")
    return torch


def _opened(name: str, gpu: Any) -> Iterator[Any]:
    path = folder(name)
    if not path.is_dir():
        pytest.skip(f"no bundle {path}: build it first (see docs/results-gdn-prefill.md)")
    with open_by_name(name) as opened:
        yield opened
        gpu.cuda.synchronize()


@pytest.fixture(scope="session", params=list(BUNDLES))
def bundle(request: pytest.FixtureRequest, gpu: Any) -> Iterator[Any]:
    """Each product bundle."""
    yield from _opened(request.param, gpu)


@pytest.fixture(scope="session", params=list(ALL))
def any_bundle(request: pytest.FixtureRequest, gpu: Any) -> Iterator[Any]:
    """Each bundle, those with the variants of the validation profile too."""
    yield from _opened(request.param, gpu)


@pytest.fixture
def bundle_name(bundle: Any) -> str:
    return next(name for name in BUNDLES if Path(bundle.path) == folder(name))


@pytest.fixture
def measure(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Keep numbers for the report, under the test's name."""

    def keep(**values: Any) -> None:
        _measured.setdefault(request.node.name, {}).update(values)

    return keep


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        file = Path(report.nodeid.partition("::")[0]).name
        _outcomes.setdefault(file, Counter())[report.outcome] += 1


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """What a worker of pytest-xdist measured."""
    for name, values in getattr(node, "workeroutput", {}).get("kernseal_measured", {}).items():
        _measured.setdefault(name, {}).update(values)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    worker: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if worker is not None:
        worker["kernseal_measured"] = json.loads(json.dumps(_measured))
        return
    target = os.environ.get("KERNSEAL_REPORT")
    if target and _measured:
        report = {
            **provenance(),
            "exit": int(exitstatus),
            "tests": session.testscollected,
            "outcomes": _outcomes,
            "measured": _measured,
        }
        Path(target).write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
