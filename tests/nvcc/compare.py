"""The kernels of bundles that come from CUDA C++, beside nvcc's build of upstream's sources as they are.

``PYTHONPATH=tests python -m nvcc.compare BUNDLE... [--json FILE] [--markdown FILE]`` shows registers, stack, spills, shared
memory and CTAs per SM of both. Exit code 1: a kernel of a bundle spills more than nvcc's.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nvcc import toolkit, upstream

from kernseal.export import elf, occupancy, output, paths, source, spec
from kernseal.export.occupancy import Occupancy
from kernseal.loader.safe_read import directory, read_all
from kernseal.loader.statement import FILE, MAX_BYTES, Kernel, Statement, parse_statement

MAX_CUBIN_BYTES = 1 << 30
OF_EACH = ("regs", "stack", "spills", "smem", "CTAs/SM")
COLUMNS = ("op", "variant", *OF_EACH, *(f"nvcc: {name}" for name in OF_EACH), "")
NUMBERS = COLUMNS[2:-1]
INTRODUCTION = """# XQA: our kernels beside nvcc's

Every kernel of the bundles that comes from CUDA C++, and what nvcc {nvcc} makes of the same variant from the sources of
{upstream} as they are, with the flags and macros of upstream's JIT. Stack and spills are bytes of local memory, spills
stores and loads together, and what is spilled lies on the stack; smem is shared memory of a thread block; CTAs/SM follow
from registers, shared memory and threads (`export/occupancy.py`), with what limits them. Compiled and inspected: nothing
here was run.

Made by this command, after `make artifacts SM={sms}`; it ends with 1 if a kernel of ours spills more than nvcc's:

    PYTHONPATH=tests .venv/bin/python -m nvcc.compare {bundles} --markdown docs/results-xqa-compiled.md
"""


@dataclass(frozen=True)
class Numbers:
    """What one compiler made of one variant.

    Attributes:
        frame: bytes of stack a thread.
    """

    registers: int
    frame: int
    spill_bytes: int
    static_smem: int
    dynamic_smem: int
    occupancy: Occupancy

    @property
    def cells(self) -> tuple[object, ...]:
        smem = self.static_smem + self.dynamic_smem
        limits = ", ".join(self.occupancy.limited_by)
        fits = f"{self.occupancy.ctas} ({limits})"
        return self.registers, self.frame, self.spill_bytes, output.size(smem), fits


@dataclass(frozen=True)
class Row:
    """One variant of one bundle."""

    sm: str
    op: str
    variant: str
    ours: Numbers
    nvcc: Numbers

    @property
    def defect(self) -> bool:
        return self.ours.spill_bytes > self.nvcc.spill_bytes

    @property
    def cells(self) -> tuple[object, ...]:
        return (
            self.op,
            self.variant,
            *self.ours.cells,
            *self.nvcc.cells,
            "SPILLS MORE" if self.defect else "",
        )


def of_record(sm: str, record: Mapping[str, Any], cubin: bytes) -> Numbers:
    fits = occupancy.of_kernel(sm, record, cubin)
    assert fits is not None, record["variant"]
    frame = elf.read(cubin).entries[record["entry"]].frame
    spills, static, dynamic = (int(record[name]) for name in ("spill_bytes", "static_smem", "dynamic_smem"))
    return Numbers(int(record["registers"]), frame, spills, static, dynamic, fits)


def of_kernel(sm: str, kernel: upstream.Kernel) -> Numbers:
    smem = kernel.static_smem + kernel.dynamic_smem
    fits = occupancy.of(sm, kernel.threads, kernel.registers, smem)
    return Numbers(
        kernel.registers, kernel.frame, kernel.spill_bytes, kernel.static_smem, kernel.dynamic_smem, fits
    )


def read(bundle: Path) -> tuple[Statement, list[tuple[Kernel, bytes]]]:
    """The manifest, and each kernel with its cubin."""
    with directory(bundle, follow=True) as root:
        statement = parse_statement(read_all(root, FILE, limit=MAX_BYTES))
        return statement, [(k, read_all(root, k.file, limit=MAX_CUBIN_BYTES)) for k in statement.kernels]


def rows_of(bundle: Path, work: Path) -> Iterator[Row]:
    """Compiles one variant after the other in ``work``."""
    statement, kernels = read(bundle)
    if statement.retarget is not None:
        raise SystemExit(f"{bundle}: is for {statement.target}; upstream's sources have no such tiles")
    for kernel, cubin in kernels:
        op = spec.load_op(paths.kernels() / kernel.op)
        cls = upstream.class_of(op, kernel.record["axes"], statement.sm)
        # A header is compiled as a part of many programs, none of which is the one that our patches make of it.
        if cls["front_end"] != "nvrtc" or not cls["module"].endswith(".cu"):
            continue
        upstream.unpack(op, work / op.name)
        theirs = upstream.compile_kernel(op, kernel.record["axes"], statement.sm, work / op.name)
        ours = of_record(statement.sm, kernel.record, cubin)
        yield Row(statement.sm, op.name, kernel.variant, ours, of_kernel(statement.sm, theirs))


def markdown(rows: Sequence[Row], bundles: Sequence[Path]) -> str:
    pin = source.upstream()
    sms = sorted({row.sm for row in rows}, key=lambda sm: int(sm[3:-1]))
    text = INTRODUCTION.format(
        nvcc=toolkit.version(),
        upstream=pin.purl.removeprefix("pkg:pypi/").replace("@", " "),
        sms=",".join(sm[3:-1] for sm in sms),
        bundles=" ".join(f"dist/{bundle.name}" for bundle in bundles),
    )
    for sm in sms:
        mine = [row for row in rows if row.sm == sm]
        fewer = sum(row.ours.spill_bytes < row.nvcc.spill_bytes for row in mine)
        more = sum(row.defect for row in mine)
        text += f"\n## {sm}\n\n{len(mine)} variants: {more} spill more than nvcc's, {fewer} less.\n\n"
        head = COLUMNS[:-1]
        text += "| " + " | ".join(head) + " |\n| --- | --- |" + " ---: |" * len(NUMBERS) + "\n"
        text += "".join("| " + " | ".join(map(str, row.cells[:-1])) + " |\n" for row in mine)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundles", nargs="+", type=Path, metavar="BUNDLE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    options = parser.parse_args()
    if reason := toolkit.unavailable():
        raise SystemExit(reason)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        for bundle in options.bundles:
            for row in rows_of(bundle, Path(name)):
                rows.append(row)
                print(f"{row.sm} {row.op}/{row.variant}", file=sys.stderr)
    for sm in dict.fromkeys(row.sm for row in rows):
        mine = [row.cells for row in rows if row.sm == sm]
        output.table(f"{sm}: {len(mine)} variants", COLUMNS, mine, NUMBERS)
    if options.json:
        found = [{**asdict(row), "defect": row.defect} for row in rows]
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(rows, options.bundles))
    return int(any(row.defect for row in rows))


if __name__ == "__main__":
    sys.exit(main())
