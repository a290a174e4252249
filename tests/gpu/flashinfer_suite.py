"""FlashInfer's own tests of what kernseal replaces, on a bundle, with its functions installed and compiling made impossible.

    PYTHONPATH=tests python -m gpu.flashinfer_suite FOLDER [--bundle sm90] [--json FILE] [--every N] [--jobs N]
    PYTHONPATH=tests python -m gpu.flashinfer_suite FOLDER --collect-variants sm_90a [--json FILE]

FOLDER holds ``tests/`` of a FlashInfer checkout; nothing in it is edited. Three things are put beside the tests, by a
plugin: kernseal's functions, references in PyTorch for those of FlashInfer's that would be compiled (paged attention in
float32, NVFP4 conversion), and, for a bundle whose kernels are meant for another SM than they were built for, that SM.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu.bundles import ALL
from gpu.flashinfer_plugin import SECONDS, SETTINGS
from gpu.provenance import provenance

from kernseal.loader.errors import Unsupported

PLUGIN = "gpu.flashinfer_plugin"
ENDED = (0, 1, 5)  # pytest's exit codes: all passed, some failed, none there
PATIENCE = 20.0  # seconds for pytest to end by itself once this is to stop
FILES = (
    "tests/attention/test_*xqa*.py",
    "tests/trace/test_xqa*.py",
    "tests/gdn/test_prefill_delta_rule.py",
    "tests/gdn/test_prefill_state_indices.py",
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bundle", choices=list(ALL), default="sm90")
    parser.add_argument("--collect-variants", metavar="SM", help="without a GPU: only list what is asked for")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--every", type=int, default=1, help="run one in N tests of each file, evenly spread")
    parser.add_argument("--jobs", type=int, default=0, help="processes (pytest-xdist); 0 is this one")
    parser.add_argument("--files", nargs="*", default=FILES, help="patterns under the folder")
    parser.add_argument("-k", default="", help="as for pytest")
    parser.add_argument(
        "--ignore-qk-norm",
        action="store_true",
        help="for tests from before use_qk_l2norm_in_kernel had an effect: it is not passed on",
    )
    return parser.parse_args()


def run(asked: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> tuple[dict[str, Any], bool]:
    """Run pytest on the files, and return what each came to and whether that is all of it.

    ``keep`` gets what there is every few seconds. SIGINT and SIGTERM end the run early.
    """
    files = sorted({str(path) for pattern in asked.files for path in asked.folder.glob(pattern)})
    if not files:
        raise SystemExit(
            f"{asked.folder}: has none of {', '.join(asked.files)}; it must hold tests/ of FlashInfer"
        )
    with tempfile.TemporaryDirectory() as name:
        empty, results = Path(name, "pytest.ini"), Path(name, "results.json")
        empty.write_text("[pytest]\n")
        settings = {
            "bundle": asked.bundle,
            "collect": asked.collect_variants,
            "every": asked.every,
            "ignore_qk_norm": asked.ignore_qk_norm,
            "results": str(results),
        }
        path = os.pathsep.join([str(asked.folder.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [
            sys.executable,
            "-u",
            "-m",
            "pytest",
            *files,
            "-c",
            str(empty),
            "--rootdir",
            str(asked.folder),
        ]
        command += ["-p", PLUGIN, "-p", "no:cacheprovider", "--import-mode=importlib"]
        command += ["--runxfail", "--continue-on-collection-errors", "-q", "--tb=no", "--no-header", "-rN"]
        command += [
            "-W",
            "ignore",
            *(["-n", str(asked.jobs)] if asked.jobs else []),
            *(["-k", asked.k] if asked.k else []),
        ]
        environment = {**os.environ, SETTINGS: json.dumps(settings), "PYTHONPATH": path}
        with subprocess.Popen(command, env=environment) as pytest:
            try:
                while pytest.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        pytest.wait(SECONDS)
                    if results.is_file():
                        keep(json.loads(results.read_text()))
            except KeyboardInterrupt:
                _end(pytest)
        if not results.is_file():
            raise SystemExit(f"pytest ended with {pytest.returncode} and no results")
        return json.loads(results.read_text()), pytest.returncode in ENDED


def _end(pytest: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
        pytest.send_signal(signal.SIGINT)
        pytest.wait(PATIENCE)
    pytest.kill()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def show(files: dict[str, Any]) -> None:
    for file, found in files.items():
        not_applicable = sum(found["not_applicable"].values())
        print(
            f"\n{file}: {found['passed']} passed, {len(found['failed'])} failed, {not_applicable} not applicable"
        )
        reasons = Counter(found["failed"].values())
        for reason, count in reasons.most_common(10):
            first = next(test for test, why in found["failed"].items() if why == reason)
            print(f"  failed {count}: {reason}\n    first {first.partition('::')[2]}")
        for reason, count in sorted(found["not_applicable"].items(), key=lambda item: -item[1]):
            print(f"  not applicable {count}: {reason}")
        for module, count in sorted(found["jit"].items()):
            print(f"  refused to compile in {count} tests: {module}")


def why_not(sm: str, name: str) -> str:
    """Why no class of ``sm`` has the variant called ``OP/VARIANT``; nothing where one has."""
    from kernseal.export.spec import Target, load_ops

    op_name, _, variant = name.partition("/")
    (op,) = [op for op in load_ops() if op.name == op_name]
    try:
        return "" if op.named(Target(sm), variant) else f"{op_name} has no variant {variant}"
    except Unsupported as error:
        return str(error)


def show_variants(files: dict[str, Any], sm: str) -> None:
    """The last line has what can be built for ``sm``: tests ask for more before they find that it is another's."""
    for file, found in files.items():
        print(f"\n{file}: {len(found['asked'])} variants")
        for variant in found["asked"]:
            print(f"  {variant}")
    every = sorted({variant for found in files.values() for variant in found["asked"]})
    nobodys = {variant: why for variant in every if (why := why_not(sm, variant))}
    for variant, why in nobodys.items():
        print(f"  not {variant}: {why}")
    print(f"\n{len(every)} variants in all, without {len(nobodys)} that {sm} has not:")
    print(" ".join(f"--variant {variant}" for variant in every if variant not in nobodys))


def main() -> int:
    asked = arguments()
    signal.signal(signal.SIGTERM, _interrupt)
    options = {"every": asked.every, "bundle": asked.bundle, "ignore_qk_norm": asked.ignore_qk_norm}
    about = {**provenance(), "options": options}

    def keep(files: dict[str, Any], complete: bool = False) -> None:
        if asked.json:
            report = {**about, "complete": complete, "files": files}
            asked.json.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")

    files, complete = run(asked, keep)
    keep(files, complete)
    show(files)
    if asked.collect_variants:
        show_variants(files, asked.collect_variants)
    if not complete:
        print("\npytest was stopped: this is what had ended until then")
        return 1
    return 1 if not asked.collect_variants and any(found["failed"] for found in files.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
