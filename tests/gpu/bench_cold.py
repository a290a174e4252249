"""Cold start: from a fresh process to its first correct result, for kernseal, FlashInfer and Triton (fla-core).

``PYTHONPATH=tests python -m gpu.bench_cold --json FILE [--document FILE] [--programs DIR] [--only NAME,...]``. Every sample
is a process of its own, and the clock runs from its start to the line that it prints once its result is in host memory;
after that it checks the result against a float64 reference. Contenders take turns A B .. B A, after a run of each that does
not count: it leaves programs and libraries in the page cache, and a warm cache filled. What needs a package that is not
here is left out, and the report says why; ``docs/runtimes.md`` lists the packages. Refuses a tree that is not a clean
commit, unless told that it is a ``--trial``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from gpu import bench_document
from gpu.bundles import BUNDLES, folder
from gpu.provenance import not_clean, provenance, versions

BUNDLE = "sm90"
OPS = {"gdn": "gdn_prefill", "xqa": "xqa_decode", "model": "model"}
TITLES = {"gdn": "GDN prefill", "xqa": "XQA decode", "model": "one model's ops"}
LIBRARIES = {"flashinfer": "FlashInfer", "triton": "Triton (fla-core)"}
CUTE = ("flashinfer", "tvm_ffi", "cutlass")
JIT: Mapping[tuple[str, str], tuple[tuple[str, ...], tuple[str, ...]]] = {
    ("flashinfer", "gdn"): (CUTE, ()),
    ("flashinfer", "xqa"): (("flashinfer", "tvm_ffi"), ("ninja",)),
    ("flashinfer", "model"): (CUTE, ("ninja",)),
    ("triton", "gdn"): (("fla", "triton"), ()),
}
"""Modules and programs that a library cannot do without, for what is asked of it."""

CACHES = {
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TVM_FFI_CACHE_DIR": "tvm_ffi",
    "CUTE_DSL_CACHE_DIR": "cute_dsl",
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "torch",
    "CUDA_CACHE_PATH": "driver",
}
"""Where the contenders and the driver keep what they compiled; in a folder of ours."""

VERSIONS = ("flashinfer-python", "apache-tvm-ffi", "nvidia-cutlass-dsl", "fla-core", "triton", "torch")
LAST = 2000
"""Characters of what a child that failed said last."""


@dataclass(frozen=True)
class Contender:
    """What is started again and again.

    Attributes:
        label: its name in charts.
        ready: parts of its time that make kernels ready to run; for what compiles at the first call, that call.
        cache: ``empty``, ``warm``, or nothing where the contender has none.
        modules, tools: what it cannot do without.
        why: why it is left out, if that is known already.
    """

    label: str
    command: tuple[str, ...]
    ready: tuple[str, ...]
    cache: str = ""
    modules: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    why: str = ""

    def missing(self) -> str:
        """Why it is left out here; nothing where it can run."""
        modules = [name for name in self.modules if importlib.util.find_spec(name) is None]
        tools = [name for name in self.tools if shutil.which(name) is None]
        return self.why or ", ".join(
            [*(f"no module {name}" for name in modules), *(f"no {name}" for name in tools)]
        )


def contenders(problem: Path, programs: Path | None) -> dict[str, Contender]:
    """Every contender by name, in the order of the charts."""
    cold = (str(programs / "cold") if programs else "cold", str(folder(BUNDLE)))
    opened, first = ("open_ms", "prepare_ms"), ("first_run_ms",)
    why = "" if programs else "no --programs"
    found = {
        "kernseal-cpp-gdn": Contender("kernseal from C++, GDN prefill of one token", cold, opened, why=why),
        "kernseal-cpp-model": Contender(
            "kernseal from C++, one model's ops", (*cold, "model"), opened, why=why
        ),
    }
    python = (sys.executable, "-m")
    for what, op in OPS.items():
        command = (*python, "gpu.cold.kernseal_child", BUNDLE, str(problem), op)
        found[f"kernseal-{what}"] = Contender(f"kernseal, {TITLES[what]}", command, opened)
    for (library, what), (modules, tools) in JIT.items():
        command = (*python, "gpu.cold.jit_child", library, str(problem), OPS[what])
        for cache in ("empty", "warm"):
            label = f"{LIBRARIES[library]}, {TITLES[what]}, {cache} cache"
            made = Contender(label, command, first, cache, modules, tools)
            found[f"{library}-{what}-{cache}"] = made
    return found


def turns(counts: Mapping[str, int]) -> list[str]:
    """Each name as often as it says, one in a round, and every other round backwards."""
    order: list[str] = []
    for number in range(max(counts.values(), default=0)):
        names = [name for name, count in counts.items() if number < count]
        order += reversed(names) if number % 2 else names
    return order


class Failed(Exception):
    """A child gave no result, or a wrong one."""


def environment(caches: Path) -> dict[str, str]:
    """This process's, with every cache in ``caches``, and with compiled Python kept as it is by default."""
    places = {name: caches / place for name, place in CACHES.items()}
    for place in places.values():
        place.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {name: str(place) for name, place in places.items()}


def run(contender: Contender, caches: Path, timeout: float) -> dict[str, float]:
    """Start a child and return its parts, what of its time is in none of them, and all of it, in milliseconds.

    Raises:
        Failed: it gave no line, ended otherwise than with 0, or took longer than ``timeout`` seconds.
        OSError: it cannot be started.
    """
    variables, parts = environment(caches), dict[str, float]()
    with tempfile.TemporaryFile("w+") as said:
        start = time.perf_counter()
        process = subprocess.Popen(
            contender.command,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            start_new_session=True,
        )
        late = threading.Timer(timeout, os.killpg, (process.pid, signal.SIGKILL))
        late.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if not parts and (parts := parts_of(line)):
                    total = (time.perf_counter() - start) * 1e3
            code = process.wait()
            in_time = late.is_alive()
        finally:
            late.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        said.seek(0)
        last = said.read()[-LAST:]
    if code or not parts:
        why = f"exit code {code}" if in_time else f"stopped after {timeout:g} s"
        raise Failed(f"{why}{'' if parts else ', no result'}: {last}")
    return {**parts, "process_ms": total - sum(parts.values()), "total_ms": total}


def parts_of(line: str) -> dict[str, float]:
    """A child's line; nothing where it is one of a library."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    right = isinstance(found, dict) and all(name.endswith("_ms") for name in found)
    return found if right else {}


def medians(contender: Contender, samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each part, and of the time that makes kernels ready."""
    ready = [sum(sample[part] for part in contender.ready) for sample in samples]
    columns = {part: [sample[part] for sample in samples] for part in samples[0]} | {"ready_ms": ready}
    return {part: round(statistics.median(values), 3) for part, values in columns.items()}


class Bench:
    """Runs contenders and keeps a report, on disk after every sample."""

    def __init__(self, report: dict[str, Any], path: Path, timeout: float, place: Path) -> None:
        self.report, self._path, self._timeout, self._place = report, path, timeout, place
        report |= {"contenders": {}, "left_out": {}, "failed": {}, "order": []}
        self._started = 0

    def measure(self, chosen: Mapping[str, Contender], counts: Mapping[str, int]) -> None:
        here: dict[str, Contender] = {}
        for name, contender in chosen.items():
            if why := contender.missing():
                self.report["left_out"][name] = why
                print(f"left out: {name}: {why}", flush=True)
            else:
                here[name] = contender
        self._warm_up(here)
        for name in turns({name: counts[name] for name in here}):
            if name not in self.report["failed"]:
                self._sample(name, here[name])
        self._save()

    def _warm_up(self, here: Mapping[str, Contender]) -> None:
        """One run of each command that does not count, on the cache that stays warm."""
        by_command: dict[tuple[str, ...], list[str]] = {}
        for name, contender in here.items():
            by_command.setdefault(contender.command, []).append(name)
        for names in by_command.values():
            self._run(names, here[names[0]], self._place / "warm", "does not count")

    def _sample(self, name: str, contender: Contender) -> None:
        place = self._place / (f"empty-{self._started}" if contender.cache == "empty" else "warm")
        parts = self._run([name], contender, place, "sample")
        if contender.cache == "empty":
            shutil.rmtree(place)
        if parts is None:
            return
        self.report["order"].append(name)
        samples = self.report["contenders"].setdefault(name, {"samples": []})["samples"]
        samples.append(parts)
        said = {"label": contender.label, "cache": contender.cache, "ready": contender.ready}
        self.report["contenders"][name] |= said | {"median": medians(contender, samples)}
        self._save()

    def _run(
        self, names: Sequence[str], contender: Contender, place: Path, why: str
    ) -> dict[str, float] | None:
        self._started += 1
        print(f"{self._started}: {', '.join(names)} ({why}) ...", end=" ", flush=True)
        try:
            parts = run(contender, place, self._timeout)
        except (Failed, OSError) as error:
            print("FAILED")
            print(error, file=sys.stderr, flush=True)
            self.report["failed"] |= dict.fromkeys(names, str(error))
            self._save()
            return None
        print(f"{parts['total_ms']:.1f} ms", flush=True)
        return {part: round(value, 4) for part, value in parts.items()}

    def _save(self) -> None:
        self._path.write_text(json.dumps(self.report, indent=1, sort_keys=True) + "\n")


def charts(report: Mapping[str, Any]) -> list[bench_document.Chart]:
    """What there is to show: nothing of a contender that failed once."""
    found = report["contenders"]
    right = [name for name in report["names"] if name in found and name not in report["failed"]]
    ready = {found[name]["label"]: found[name]["median"]["ready_ms"] for name in right if "-model" in name}
    total = {found[name]["label"]: found[name]["median"]["total_ms"] for name in right}
    how = (
        f"Median of {report['samples']} fresh processes ({report['empty_samples']} where a cache is empty), in turns "
        "A B B A, page cache warm."
    )
    shown = [
        (
            "Open, verify and prepare: one model's ops",
            f"{how} kernseal: open, verify and prepare {report['prepared']} variants. FlashInfer has no such step: its "
            "first call of GDN prefill and of XQA decode, which compiles or loads, and runs.",
            ready,
        ),
        (
            "Fresh process to first correct result",
            f"{how} From the start of the process to a result in host memory, found correct afterwards. All from Python "
            "solve the same problem.",
            total,
        ),
    ]
    return [
        bench_document.bars(title, measures, "ms", "contender", values, log=True)
        for title, measures, values in shown
        if values
    ]


def show(report: Mapping[str, Any]) -> None:
    """Medians, and how many times longer others take than kernseal until one model's ops have run."""
    median = {name: of["median"] for name, of in report["contenders"].items()}
    ours = median.get("kernseal-model")
    for name in report["names"]:
        if name in median:
            line = (
                f"{name}: ready {median[name]['ready_ms']:.2f} ms, in all {median[name]['total_ms']:.1f} ms"
            )
            if ours and "-model-" in name:
                times = median[name]["first_run_ms"] / (ours["ready_ms"] + ours["first_run_ms"])
                line += f"; first call {times:.0f} times kernseal's open, prepare and first run"
            print(line)
    for kind in ("left_out", "failed"):
        for name, why in report[kind].items():
            print(f"{kind.replace('_', ' ')}: {name}: {why.splitlines()[0]}")


def write_document(path: Path, report: Mapping[str, Any]) -> None:
    bench_document.write(path, "Cold start", report, report["command"], charts(report), report["versions"])


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--document", type=Path, help="a benchmark document as well; needs jsonschema")
    parser.add_argument("--from-json", action="store_true", help="measure nothing: the document of --json")
    parser.add_argument("--programs", type=Path, help="what build_programs.sh made, for kernseal from C++")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--empty-samples", type=int, default=1, help="of those that compile everything")
    parser.add_argument("--only", default="*", help="names, or patterns of them such as *-model*")
    parser.add_argument("--timeout", type=float, default=600, help="seconds of one child")
    parser.add_argument("--trial", action="store_true", help="measure whatever is there; the report says so")
    return parser.parse_args(given)


def refusal(options: argparse.Namespace, stamp: Mapping[str, Any]) -> str:
    """Why nothing is measured; nothing where all is well."""
    if options.document and not bench_document.can_write():
        return "--document needs jsonschema; without it --json alone, and --from-json --document where there is one"
    if options.from_json:
        return "" if options.document else "--from-json goes with --document"
    if options.document and not (stamp["device"] and stamp["commit"]):
        return "--document has to name a device and a commit"
    if not options.trial and (why := not_clean(stamp)):
        return why
    if not folder(BUNDLE).is_dir():
        return f"no bundle {BUNDLES[BUNDLE]}"
    if options.programs and not (options.programs / "cold").is_file():
        return f"no program {options.programs / 'cold'}"
    return ""


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    report = provenance() | {"trial": options.trial, "versions": versions(VERSIONS)}
    report |= {"samples": options.samples, "empty_samples": options.empty_samples}
    if why := refusal(options, report):
        print(f"refused: {why}")
        return 2
    if options.from_json:
        write_document(options.document, json.loads(options.json.read_text()))
        return 0
    report["command"] = shlex.join(
        ["python", "-m", "gpu.bench_cold", *(sys.argv[1:] if given is None else given)]
    )
    with tempfile.TemporaryDirectory() as name:
        problem = Path(name, "problem")
        known = contenders(problem, options.programs)
        patterns = options.only.split(",")
        if unknown := [text for text in patterns if not any(fnmatchcase(name, text) for name in known)]:
            print(f"refused: --only {','.join(unknown)}; there are {', '.join(known)}")
            return 2
        chosen = {
            name: one for name, one in known.items() if any(fnmatchcase(name, text) for text in patterns)
        }
        report |= {"names": list(chosen)} | written(problem)
        counts = {
            name: options.empty_samples if one.cache == "empty" else options.samples
            for name, one in chosen.items()
        }
        Bench(report, options.json, options.timeout, Path(name)).measure(chosen, counts)
    show(report)
    if options.document and charts(report):
        write_document(options.document, report)
    return 1 if report["failed"] or not report["contenders"] else 0


def written(problem: Path) -> dict[str, Any]:
    """Write the problem, and return what the report says of it."""
    from gpu.cold.write_problem import Sizes, write  # torch, which a refusal does not need

    print("computing the expected results ...", flush=True)
    problem.mkdir()
    found = write(problem, Sizes())
    prepared = len(found["problems"]) + len(found["also"])
    return {"problem": found, "prepared": prepared}


if __name__ == "__main__":
    sys.exit(main())
