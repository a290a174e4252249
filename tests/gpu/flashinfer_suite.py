"""FlashInfer's own tests of what kernseal replaces, on a bundle, with its functions installed and compiling made impossible.

    PYTHONPATH=tests python -m gpu.flashinfer_suite FOLDER [--bundle sm90] [--json FILE] [--every N] [--jobs N]
    PYTHONPATH=tests python -m gpu.flashinfer_suite FOLDER --collect-variants sm_90a [--json FILE]

FOLDER holds ``tests/`` of a FlashInfer checkout; nothing in it is edited. Three things are put beside the tests, by a
plugin: kernseal's functions, references in PyTorch for those of FlashInfer's that would be compiled (paged attention in
float32, NVFP4 conversion), and, for a bundle whose kernels are meant for another SM than they were built for, that SM.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from gpu.bundles import ALL
from gpu.flashinfer_plugin import SETTINGS
from gpu.provenance import provenance

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


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Run pytest on the files and return what each came to."""
    files = sorted({str(path) for pattern in asked.files for path in asked.folder.glob(pattern)})
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
        command = [sys.executable, "-m", "pytest", *files, "-c", str(empty), "--rootdir", str(asked.folder)]
        command += ["-p", "gpu.flashinfer_plugin", "-p", "no:cacheprovider", "--import-mode=importlib"]
        command += ["--runxfail", "--continue-on-collection-errors", "-q", "--tb=no", "--no-header", "-rN"]
        command += [
            "-W",
            "ignore",
            *(["-n", str(asked.jobs)] if asked.jobs else []),
            *(["-k", asked.k] if asked.k else []),
        ]
        environment = {**os.environ, SETTINGS: json.dumps(settings), "PYTHONPATH": path}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        print("\n".join(done.stdout.splitlines()[-5:]))
        if not results.is_file():
            raise SystemExit(f"pytest ended with {done.returncode} and no results:\n{done.stdout[-4000:]}")
        found: dict[str, Any] = json.loads(results.read_text())
        return found


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


def show_variants(files: dict[str, Any]) -> None:
    for file, found in files.items():
        print(f"\n{file}: {len(found['asked'])} variants")
        for variant in found["asked"]:
            print(f"  {variant}")
    every = sorted({variant for found in files.values() for variant in found["asked"]})
    print(f"\n{len(every)} variants in all:")
    print(" ".join(f"--variant {variant}" for variant in every))


def main() -> int:
    asked = arguments()
    files = run(asked)
    show(files)
    if asked.collect_variants:
        show_variants(files)
    if asked.json:
        options = {"every": asked.every, "bundle": asked.bundle, "ignore_qk_norm": asked.ignore_qk_norm}
        report = {**provenance(), "options": options, "files": files}
        asked.json.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    return 1 if not asked.collect_variants and any(found["failed"] for found in files.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
