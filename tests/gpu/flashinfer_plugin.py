"""Pytest plugin that runs FlashInfer's own tests on a bundle: see ``flashinfer_suite``, which loads it with ``-p``."""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

SETTINGS = "KERNSEAL_FLASHINFER_SUITE"
SECONDS = 5.0  # between two writings of the results

# Where kernseal and the tests do not agree, and why. None of these is about a number that a kernel computes.
OWN_WORDS = "asserts the words of FlashInfer's own error"
DIFFERS = {
    "test_checkpoint_alignment_error": OWN_WORDS,
    "test_checkpoint_negative_interval": OWN_WORDS,
    "test_checkpoint_missing_tensors": OWN_WORDS,
    "test_checkpoint_spurious_tensors": OWN_WORDS,
    "test_checkpoint_wrong_dtype": OWN_WORDS,
    "test_checkpoint_wrong_cu_starts_size": OWN_WORDS,
    "test_prefill_state_indices_requires_output_state_pool": OWN_WORDS,
    "test_prefill_zero_length_sequence_state_untouched": "kernseal writes the state of an empty sequence",
}


class Jit:
    """What FlashInfer would have compiled, also where its code went on without."""

    def __init__(self) -> None:
        self.attempts: list[str] = []

    def watch(self) -> None:
        from kernseal.loader import flashinfer_jit

        refuse = flashinfer_jit.refuse

        def refused(what: str) -> None:
            self.attempts.append(what)
            refuse(what)

        flashinfer_jit.refuse = refused


class Asked:
    """The variants that functions ask for, whether the bundle has them or not."""

    def __init__(self) -> None:
        self.variants: set[str] = set()

    def watch(self) -> None:
        from kernseal.loader import serving

        prepare = serving.Served.prepare

        def asked(served: Any, op: str, **axes: Any) -> Any:
            self.variants.add(serving.build_command(served.bundle, op, axes).rpartition(" ")[2])
            return prepare(served, op, **axes)

        serving.Served.prepare = asked  # type: ignore[method-assign]

    def forget(self) -> None:
        """So that the next test asks for what it needs, whatever ran before."""
        from kernseal.loader import serving

        self.variants.clear()
        for served in serving._served.values():
            served.ops.clear()
            served.calls.clear()


class Suite:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.jit, self.asked = Jit(), Asked()
        self.open = ExitStack()

    def start(self) -> None:
        import flashinfer
        from gpu import flashinfer_references
        from gpu.bundles import open_by_name

        self.jit.watch()
        flashinfer_references.replace()
        self.asked.watch()
        collecting = self.settings["collect"]
        if collecting:
            from gpu import flashinfer_host

            bundle, device = flashinfer_host.pretend(collecting), flashinfer_host.DEVICE
        else:
            bundle, device = self.open.enter_context(open_by_name(self.settings["bundle"])), 0
        statement = bundle.statement
        if collecting or statement.retarget is not None:
            _pretend_capability(flashinfer, statement.sm)
        from kernseal.loader.flashinfer import installed

        self.open.enter_context(installed(bundle, device=device))
        if self.settings["ignore_qk_norm"]:
            _ignore_qk_norm()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        files: dict[Path, list[pytest.Item]] = {}
        for item in items:
            files.setdefault(item.path, []).append(item)
        items[:] = [item for group in files.values() for item in group[:: self.settings["every"]]]
        if self.settings["collect"]:
            from gpu import flashinfer_host

            for module in {item.module for item in items if isinstance(item, pytest.Function)}:
                flashinfer_host.end_before_comparing(module)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.asked.forget()
        self.jit.attempts.clear()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = yield
        if call.when == "call" or report.outcome != "passed":
            name = getattr(item, "originalname", item.name)
            outcome, reason = _judge(name, report, call.excinfo)
            asked, attempts = sorted(self.asked.variants), sorted(set(self.jit.attempts))
            if self.settings["collect"] and asked:
                outcome, reason = "passed", ""
            report.user_properties.append(
                ("kernseal", {"outcome": outcome, "reason": reason, "asked": asked, "jit": attempts})
            )
        return report

    def pytest_unconfigure(self) -> None:
        import torch

        torch.cuda.synchronize()
        self.open.close()


class Results:
    """What the tests of each file came to; lives where the reports arrive.

    Written as they come: a run that is stopped has what had ended.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, dict[str, Any]] = {}
        self.written = -SECONDS

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, found in report.user_properties:
            if name == "kernseal" and isinstance(found, dict):
                self._add(report.nodeid, found)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed" and report.nodeid.endswith(".py"):
            words = str(getattr(report.longrepr, "reprcrash", None) or report.longrepr).strip().splitlines()
            reason = f"cannot be imported: {words[-1][:300]}"
            self._add(report.nodeid, {"outcome": "not applicable", "reason": reason, "asked": [], "jit": []})

    def _add(self, nodeid: str, found: dict[str, Any]) -> None:
        file = self.files.setdefault(
            nodeid.partition("::")[0],
            {"passed": 0, "failed": {}, "not_applicable": {}, "asked": [], "jit": {}},
        )
        if found["outcome"] == "passed":
            file["passed"] += 1
        elif found["outcome"] == "failed":
            file["failed"][nodeid] = found["reason"]
        else:
            count = file["not_applicable"].get(found["reason"], 0)
            file["not_applicable"][found["reason"]] = count + 1
        file["asked"] = sorted({*file["asked"], *found["asked"]})
        for module in found["jit"]:
            file["jit"][module] = file["jit"].get(module, 0) + 1
        if time.monotonic() - self.written >= SECONDS:
            self._write()

    def pytest_sessionfinish(self) -> None:
        self._write()

    def _write(self) -> None:
        part = self.path.with_name(f"{self.path.name}.part")
        part.write_text(json.dumps(self.files, indent=1, sort_keys=True) + "\n")
        part.replace(self.path)
        self.written = time.monotonic()


def pytest_configure(config: pytest.Config) -> None:
    settings = json.loads(os.environ[SETTINGS])
    worker = hasattr(config, "workerinput")
    if not worker:
        config.pluginmanager.register(Results(Path(settings["results"])), "kernseal-results")
    if worker or not getattr(config.option, "numprocesses", None):
        suite = Suite(settings)
        suite.start()
        config.pluginmanager.register(suite, "kernseal-suite")


def _judge(name: str, report: Any, excinfo: pytest.ExceptionInfo[BaseException] | None) -> tuple[str, str]:
    from kernseal.loader.errors import JitRefused, Unsupported

    if report.outcome == "passed":
        return "passed", ""
    if report.outcome == "skipped":
        return "not applicable", f"skipped: {report.longrepr[2].removeprefix('Skipped: ')}"
    error = None if excinfo is None else excinfo.value
    words = (str(error) or repr(error)).strip().splitlines()[0]
    if name in DIFFERS:
        return "not applicable", DIFFERS[name]
    if isinstance(error, JitRefused):
        return "not applicable", f"its own helper compiles: {error.module}"
    if isinstance(error, Unsupported):
        command = "kernseal build "
        lacking = words.rpartition(" ")[2] if command in words else None
        return "not applicable", f"needs the variant {lacking}" if lacking else words
    return "failed", f"{type(error).__name__}: {words[:300]}"


def _pretend_capability(flashinfer: Any, sm: str) -> None:
    """Let FlashInfer take the device for the SM that the bundle's kernels are meant for."""
    digits = sm.removeprefix("sm_").rstrip("af")
    capability = int(digits[:-1]), int(digits[-1])
    utils = importlib.import_module("flashinfer.utils")
    from kernseal.loader.flashinfer import rename

    rename(utils.get_compute_capability, lambda device: capability)
    for name in dir(utils):
        if name.startswith("is_sm") and hasattr(getattr(utils, name), "cache_clear"):
            getattr(utils, name).cache_clear()


def _ignore_qk_norm() -> None:
    """Tests from before ``use_qk_l2norm_in_kernel`` had an effect pass it and compare with what has none."""
    from kernseal.loader.flashinfer import rename

    ours = importlib.import_module("flashinfer.gdn_prefill").chunk_gated_delta_rule
    position = 9

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("use_qk_l2norm_in_kernel", None)
        return ours(
            *args[:position], *([False] if len(args) > position else []), *args[position + 1 :], **kwargs
        )

    rename(ours, call)
