"""How long opening a bundle from Python takes, without a GPU: ``PYTHONPATH=tests python -m bench_open BUNDLE [--key FILE]``.

Each sample is a process of its own over the recording driver of the tests, so that nothing of a driver or a device is in
it. Prints medians in milliseconds: importing the loader, the default policy, opening (against it, or against the public
key in FILE), and preparing the bundle's first variant.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SAMPLES = 7
CHILD = """
import json, sys, time
laps = [time.perf_counter()]
import kernseal
from kernseal.loader.op import load_spec
from kernseal.loader.policy import Policy
laps.append(time.perf_counter())
policy = Policy.default()
laps.append(time.perf_counter())
if len(sys.argv) > 2:
    from pathlib import Path
    policy = Policy.from_options(keys=[Path(sys.argv[2])])
laps.append(time.perf_counter())
bundle = kernseal.open(sys.argv[1], policy=policy, allow_validation=True)
laps.append(time.perf_counter())
variant, = bundle.variants()[:1]
spec = load_spec(variant.op)
known = {name: bundle._library.enum(enum) for name, enum in spec.config_enums.items()}
axes = {n: t if n in known else type(spec.config_defaults.get(n, 0))(int(t)) for n, t in variant.axes.items()}
laps.append(time.perf_counter())
bundle.prepare(variant.op, **axes)
laps.append(time.perf_counter())
took = [(after - before) * 1e3 for before, after in zip(laps, laps[1:])]
print(json.dumps({"import": took[0], "default policy": took[1], "open": took[3], "prepare": took[5]}))
"""


def sample(bundle: Path, key: Path | None, driver: Path) -> dict[str, float]:
    statement = json.loads((bundle / "manifest.json").read_bytes())
    target = statement["predicate"]["buildDefinition"]["externalParameters"]
    sm = (target.get("retarget") or target["sm"]).removeprefix("sm_").rstrip("af")
    variables = {**os.environ, "LD_LIBRARY_PATH": str(driver.parent), "FAKE_CUDA_CC": sm}
    command = [sys.executable, "-c", CHILD, str(bundle), *([str(key)] if key else [])]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"bench_open: {done.stderr}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def medians(bundle: Path, key: Path | None, samples: int = SAMPLES) -> dict[str, float]:
    """Milliseconds by part; a first process does not count."""
    from cpu.fake_driver.native import build_fake_driver

    with tempfile.TemporaryDirectory() as folder:
        driver = build_fake_driver(Path(folder))
        taken = [sample(bundle, key, driver) for _ in range(samples + 1)][1:]
    return {part: round(statistics.median(one[part] for one in taken), 1) for part in taken[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument(
        "--key", type=Path, help="a public key to trust instead of the pins and keys of the package"
    )
    options = parser.parse_args()
    for part, taken in medians(options.bundle, options.key).items():
        print(f"{part:<16} {taken:8.1f} ms")


if __name__ == "__main__":
    main()
