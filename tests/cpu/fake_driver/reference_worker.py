"""``python reference_worker.py job.json``: the exporter's compile, plus what CuTe itself would export of the same kernel.

Beside the exporter's ``host.o`` it writes ``<prefix>.h`` and ``<prefix>.o``: CuTe's C header and its host object as is.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kernseal.export import cute_worker
from kernseal.export.job import CuteJob

_ours = cute_worker.host_object


def both(compiled: Any, job: CuteJob, path: Path) -> None:
    _ours(compiled, job, path)
    compiled.export_to_c(job.out, job.prefix, function_prefix=job.prefix)


if __name__ == "__main__":
    cute_worker.host_object = both
    cute_worker.compile_variant(CuteJob.load(Path(sys.argv[1])))
