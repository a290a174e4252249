"""XQA and FA2 decode beside FlashInfer's, a Triton decode, and the time that a plain copy would take to read the cache.

``PYTHONPATH=tests python -m gpu.bench_xqa_decode [--json FILE] [--document FILE] [--quick] [--triton-decode FILE]``. Both
rules for splitting a sequence are timed, the library's own (``kv_splits`` 0) and the one that fills the device (-1), as
FlashInfer does; of a cache in 16 bits ``paged_prefill`` too, planned beforehand as FlashInfer's FA2 is. All sides of a row
alternate A B .. B A. Before each measurement other memory is read, so that nothing of the cache is in L2. Who is absent,
raises or computes something else is left out of a row, and the report says why. The report is written after each row; the
document of one that was stopped can be had with ``--from-json``, and one report of several with other geometries.
``--prepare`` compiles what FlashInfer would compile when called, and ends.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from gpu.bench_document import Chart
from gpu.bench_options import bundles_here, lines, parser, stamp, use_gpu, write_charts, write_numbers
from gpu.bundles import open_by_name
from gpu.contenders import Contender, Contenders
from gpu.left_out import reason, reasons
from gpu.timing import Call, compare, device_us, host_us
from gpu.xqa_contenders import (
    Geometry,
    compile_flashinfer,
    flashinfer_fa2,
    flashinfer_xqa,
    load_triton,
    triton_decode,
)
from gpu.xqa_problems import Axes, Problem, Runner, make

from kernseal.loader.bundle import Bundle

GEOMETRIES: tuple[Geometry, ...] = (
    ("bf16", 128, 8),
    ("bf16", 128, 4),
    ("bf16", 256, 8),
    ("e4m3", 128, 8),
    ("e4m3", 128, 4),
)
BATCHES, LENGTHS = (1, 8, 64, 128), (512, 2048, 8192, 32768, 65536)
QUICK_GEOMETRIES, QUICK_BATCHES, QUICK_LENGTHS = (GEOMETRIES[0], GEOMETRIES[3]), (1, 8, 64), (2048, 32768)
KV_HEADS, PAGE_SIZE = 4, 16
MOST_KV_BYTES = 16 << 30
"""Of one problem: bounds memory, and time."""
ELEMENT_BYTES = {"bf16": 2, "e4m3": 1}
ROUNDS, SAMPLES = 2, 4
CAPACITY = 131072
"""Positions that the page table has room for: a table wider than its sequences must cost nothing."""
RULES = {"library": 0, "fill": -1}
LIMIT = {"bf16": 2e-2, "e4m3": 1e-1}
"""Largest relative difference of two outputs: an e4m3 cache may be multiplied in e4m3."""
COLD_BYTES = 256 << 20
"""More than any L2."""
CHARTED = (1, 8, 64)

Row = Mapping[str, Any]


def name_of(geometry: Geometry) -> str:
    kv_dtype, dim, group = geometry
    return f"{kv_dtype}-d{dim}-g{group}"


def geometry_of(text: str) -> Geometry:
    """``bf16-d128-g8``."""
    try:
        kv_dtype, dim, group = text.split("-")
        if kv_dtype not in ELEMENT_BYTES or dim[:1] != "d" or group[:1] != "g":
            raise ValueError
        return kv_dtype, int(dim[1:]), int(group[1:])
    except ValueError:
        known = "|".join(ELEMENT_BYTES)
        raise argparse.ArgumentTypeError(f"{text!r}: supported is ({known})-dN-gN") from None


def kv_bytes(geometry: Geometry, batch: int, length: int) -> int:
    """What a launch reads of K and V."""
    kv_dtype, dim, _ = geometry
    return 2 * batch * length * KV_HEADS * dim * ELEMENT_BYTES[kv_dtype]


def grid(geometries: Sequence[Geometry], quick: bool) -> list[tuple[Geometry, int, int]]:
    """Geometry, batch size and KV length."""
    batches, lengths = (QUICK_BATCHES, QUICK_LENGTHS) if quick else (BATCHES, LENGTHS)
    cells = itertools.product(geometries, batches, lengths)
    return [cell for cell in cells if kv_bytes(*cell) <= MOST_KV_BYTES]


def axes_of(geometry: Geometry, fp8_math: bool = False) -> dict[str, Any]:
    """Config of a variant."""
    kv_dtype, dim, group = geometry
    axes = {"dtype": "bf16", "kv_dtype": kv_dtype, "out_dtype": "bf16", "head_dim": dim, "group_size": group}
    flags = {"sliding_window": False, "spec_decode": False, "fp8_math": fp8_math}
    return {**axes, "page_size": PAGE_SIZE, **flags}


def median(samples: list[float]) -> float:
    return round(statistics.median(samples), 2)


def copy_rate() -> float:
    """TB/s of a device-to-device copy, both ways counted."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    taken = median([device_us(lambda: target.copy_(source)) for _ in range(15)])
    return round(2 * int(source.numel()) / taken / 1e6, 3)


def cold_clock() -> Callable[[Call], float]:
    """Device time of a call that finds nothing of its own in L2."""
    other = torch.zeros(COLD_BYTES // 4, dtype=torch.float32, device="cuda")
    return lambda call: device_us(
        call, first=other.sum
    )  # read, not written: writing back would go on during the call


def ours(bundle: Bundle, axes: Axes, p: Problem, **how: int) -> Contender:
    runner, out = Runner(bundle, axes), torch.empty_like(p.q)
    args = runner.arguments(p, out, **how)
    return Contender(lambda: runner.op.run(**args), lambda: out)


def our_fa2(bundle: Bundle, p: Problem) -> Contender:
    """``paged_prefill`` of a row a sequence, its parts chosen as FlashInfer's FA2 chooses them, planned beforehand."""
    (batch, columns), out = p.page_table.shape, torch.empty_like(p.q)
    dim = p.axes["head_dim"]
    op = bundle.prepare("paged_prefill", dtype=p.axes["dtype"], head_dim=dim, causal=False)
    args = {
        "q": p.q,
        "k": p.k,
        "v": p.v,
        "o": out,
        "page_indices": p.page_table.flatten(),
        "qo_indptr": torch.arange(batch + 1, dtype=torch.int32),
        "page_indptr": torch.arange(0, batch * columns + 1, columns, dtype=torch.int32),
        "kv_lens": p.seq_lens.cpu(),
        "sm_scale": dim**-0.5,
        "kv_chunk": -1,
        "stream": torch.cuda.current_stream(),
    }
    args["workspace"] = torch.empty(op.workspace_size(**args), dtype=torch.uint8, device=p.q.device)
    args["plan"] = torch.empty(op.plan(**args), dtype=torch.uint8)
    op.plan(**args)
    args["plan_device"] = args["plan"].to(p.q.device)
    return Contender(lambda: op.run(**args), lambda: out)


def contenders_of(
    bundles: Mapping[str, Bundle],
    geometry: Geometry,
    p: Problem,
    length: int,
    quick: bool,
    triton: ModuleType | str,
    given_up: dict[str, str],
    note: dict[str, Any],
) -> Contenders:
    found = Contenders(LIMIT[geometry[0]], given_up)
    for (name, bundle), fp8_math in itertools.product(bundles.items(), (False, True)):
        if fp8_math and geometry[0] != "e4m3":
            continue
        label, axes = f"{name} fp8_math" if fp8_math else name, axes_of(geometry, fp8_math)
        for rule, splits in RULES.items():
            make_it = functools.partial(ours, bundle, axes, p, kv_splits=splits, max_seq_len=length)
            found.add(f"{label} {rule}", make_it)
        if not quick:
            found.add(f"{label} library, length unknown", functools.partial(ours, bundle, axes, p))
    if geometry[0] in ("bf16", "f16"):
        for name, bundle in bundles.items():
            found.add(f"{name} fa2", functools.partial(our_fa2, bundle, p))
    found.add("flashinfer xqa", functools.partial(flashinfer_xqa, p))
    found.add("flashinfer fa2 tensor cores", functools.partial(flashinfer_fa2, p, True))
    found.add("flashinfer fa2 cuda cores", functools.partial(flashinfer_fa2, p, False))
    if isinstance(triton, str):
        found.left_out["triton"] = triton
    else:
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        chosen = functools.partial(note.__setitem__, "triton_splits")
        found.add("triton", functools.partial(triton_decode, triton, p, sms, chosen))
    return found


def measured(
    bundles: Mapping[str, Bundle],
    cell: tuple[Geometry, int, int],
    copy_tb_per_s: float,
    clock: Callable[[Call], float],
    **asked: Any,
) -> dict[str, Any]:
    """All contenders of one problem in one run."""
    geometry, batch, length = cell
    p = make(axes_of(geometry), [length] * batch, kv_heads=KV_HEADS, pages=CAPACITY // PAGE_SIZE)
    note: dict[str, Any] = {}
    found = contenders_of(bundles, geometry, p, length, note=note, **asked)
    times = compare(found.calls, rounds=ROUNDS, samples=SAMPLES, clocks={"device_us": clock})
    row = {"geometry": name_of(geometry), "batch": batch, "length": length, **note}
    row |= {"times": times, "differs_by": found.differs_by, "left_out": found.left_out}
    first = next(iter(found.calls.values()), None)
    if first is not None:
        row["host_us"] = median([host_us(first) for _ in range(2 * ROUNDS)])
    return row | rates(
        kv_bytes(*cell), {k: v["device_us"]["median"] for k, v in times.items()}, copy_tb_per_s
    )


def rates(read: int, taken: Mapping[str, float], copy_tb_per_s: float) -> dict[str, Any]:
    """Times beside the floor: the bytes of KV at the speed of a plain copy. A share of 1 is the floor itself."""
    floor = read / copy_tb_per_s / 1e6
    return {
        "kv_bytes": read,
        "floor_us": round(floor, 2),
        "device_us": dict(taken),
        "tb_per_s": {name: round(read / us / 1e6, 3) for name, us in taken.items()},
        "share_of_floor": {name: round(floor / us, 3) for name, us in taken.items()},
    }


def best(values: Mapping[str, float], *starts: str) -> float | None:
    """The largest value of a name that begins so."""
    return max((value for name, value in values.items() if name.startswith(starts)), default=None)


def line(row: Row) -> str:
    taken = ", ".join(f"{name} {us:.0f}" for name, us in row["device_us"].items())
    return f"{row['geometry']} {row['batch']} x {row['length']}: floor {row['floor_us']:.0f}, {taken} us"


def kernel_name(row: Row, bundle: str) -> str:
    """The contender that is FlashInfer's kernel and split: its SM90 code multiplies an e4m3 cache in e4m3."""
    return f"{bundle} fp8_math fill" if row["geometry"].startswith("e4m3") else f"{bundle} fill"


def claims(rows: Sequence[Row], bundle: str) -> list[str]:
    """A line for each other contender: where it is nearest to the fastest of a bundle's sides. FlashInfer's own fastest,
    its FA2 alone, and Triton; then the same kernel on both sides."""
    said = []
    for other in ("flashinfer", "flashinfer fa2", "triton"):
        pairs = [(best(r["tb_per_s"], f"{bundle} "), best(r["tb_per_s"], other), r) for r in rows]
        found = [(mine / theirs, r) for mine, theirs, r in pairs if mine and theirs]
        if found:
            least, row = min(found, key=lambda pair: pair[0])
            said.append(
                f"{bundle}: at least {least:.2f} x {other}'s speed, at {row['geometry']} {row['batch']} x {row['length']}"
            )
    for mine, theirs, words in (
        (lambda row: kernel_name(row, bundle), "flashinfer xqa", "flashinfer xqa's time"),
        (lambda row: f"{bundle} fa2", "flashinfer fa2 tensor cores", "flashinfer fa2's time on tensor cores"),
    ):
        both = [r for r in rows if {theirs, mine(r)} <= r["device_us"].keys()]
        if both:
            most, row = max(
                ((r["device_us"][mine(r)] / r["device_us"][theirs], r) for r in both),
                key=lambda pair: pair[0],
            )
            where = f"{row['geometry']} {row['batch']} x {row['length']}"
            said.append(f"{mine(row)}: at most {most:.3f} x {words}, at {where}")
    return said


def charts(rows: Sequence[Row], bundle: str, copy_tb_per_s: float) -> list[Chart]:
    how = f"Median device time of {2 * ROUNDS * SAMPLES} launches, all sides in turn, nothing in L2; {KV_HEADS} KV heads, "
    how += f"pages of {PAGE_SIZE}, bf16 q. A plain copy moved {copy_tb_per_s:.2f} TB/s."
    x, made = "tokens of context", []
    for geometry in dict.fromkeys(row["geometry"] for row in rows):
        mine = [row for row in rows if row["geometry"] == geometry]
        for batch in CHARTED:
            some = [row for row in mine if row["batch"] == batch]
            title = f"XQA decode: KV read, {geometry}, batch {batch}"
            series = {
                label: [
                    (row["length"], value)
                    for row in some
                    if (value := best(row["tb_per_s"], *starts)) is not None
                ]
                for label, starts in sides(bundle).items()
            }
            made += lines(title, f"Bytes of K and V a second. {how}", "TB/s", x, series, better="higher")
        shares = {
            f"batch {batch}": [
                (row["length"], value)
                for row in mine
                if row["batch"] == batch and (value := best(row["share_of_floor"], f"{bundle} ")) is not None
            ]
            for batch in sorted({row["batch"] for row in mine})
        }
        title = f"XQA decode: share of the floor, {geometry}"
        text = f"Time to read K and V at the speed of a plain copy over the time taken. {how}"
        made += lines(title, text, "of 1", x, shares, better="higher")
    return made


def sides(bundle: str) -> dict[str, tuple[str, ...]]:
    """Lines of a chart, and how the names begin of which each is the best."""
    return {
        "kernseal, library's split": (f"{bundle} library", f"{bundle} fp8_math library"),
        "kernseal, filling the device": (f"{bundle} fill", f"{bundle} fp8_math fill"),
        "kernseal FA2": (f"{bundle} fa2",),
        "FlashInfer XQA": ("flashinfer xqa",),
        "FlashInfer FA2": ("flashinfer fa2",),
        "Triton (SGLang)": ("triton",),
    }


def joined(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One report of several about the same bundles: rows in turn, the rest as the first says it."""
    first = reports[0]
    for other in reports[1:]:
        for field in (
            "commit",
            "dirty",
            "device",
            "bundles",
            *(f"bundle_{name}" for name in first["bundles"]),
        ):
            if other[field] != first[field]:
                raise SystemExit(f"refused: {field} is {first[field]} and {other[field]}")
    rows = [row for report in reports for row in report["rows"]]
    said = [s for name in first["bundles"] for s in claims(rows, name)]
    complete = all(report["complete"] for report in reports)
    return first | {"rows": rows, "claims": said, "complete": complete}


def write_document(options: argparse.Namespace, report: dict[str, Any]) -> None:
    made = charts(report["rows"], report["bundles"][0], report["copy_tb_per_s"])
    write_charts(options, "XQA decode", report, made)


def triton_or_why(path: Path | None) -> ModuleType | str:
    if path is None:
        return "no --triton-decode"
    try:
        return load_triton(path)
    except (Exception, SystemExit) as error:
        return reason(error)


def compile_others(geometries: Sequence[Geometry]) -> str:
    """Compile FlashInfer's modules all at once and say what came of it."""
    start = time.perf_counter()
    try:
        count = compile_flashinfer(geometries, PAGE_SIZE)
    except (Exception, SystemExit) as error:
        return f"FlashInfer's modules are not there beforehand: {reason(error)}"
    return f"{count} modules of FlashInfer compiled or found in {time.perf_counter() - start:.0f} s"


def main() -> int:
    asking = parser(__doc__)
    asking.add_argument("--geometries", nargs="+", type=geometry_of, help="such as bf16-d128-g8")
    asking.add_argument("--triton-decode", type=Path, help="SGLang's file; gpu/xqa_contenders.py says which")
    asking.add_argument(
        "--from-json", nargs="+", type=Path, metavar="FILE", help="measure nothing: one report of these"
    )
    asking.add_argument("--prepare", action="store_true", help="only compile what FlashInfer would compile")
    options = asking.parse_args()
    geometries = options.geometries or (QUICK_GEOMETRIES if options.quick else GEOMETRIES)
    if options.prepare:
        print(compile_others(geometries))
        return 0
    if options.from_json:
        report = joined([json.loads(path.read_text()) for path in options.from_json])
        write_numbers(options, report)
        write_document(options, report)
        return 0
    report = stamp(options.trial) | {"quick": options.quick}
    use_gpu()
    names = bundles_here()
    report |= {"compiled": compile_others(geometries), "bundles": names}
    cells = grid(geometries, options.quick)
    each = 2 * ROUNDS * SAMPLES
    print(report["compiled"])
    print(f"{len(cells)} rows of 7 to 16 contenders, {each} measurements of 5 ms or more each", flush=True)
    bundles = {name: open_by_name(name) for name in names}
    asked = {"quick": options.quick, "triton": triton_or_why(options.triton_decode)}
    rate, clock = copy_rate(), cold_clock()
    rows: list[dict[str, Any]] = []
    report |= {"copy_tb_per_s": rate, "rows": rows}
    given_up: dict[Geometry, dict[str, str]] = {geometry: {} for geometry in geometries}
    for index, cell in enumerate(cells, 1):
        rows.append(measured(bundles, cell, rate, clock, given_up=given_up[cell[0]], **asked))
        report |= {
            "complete": index == len(cells),
            "claims": [s for name in names for s in claims(rows, name)],
        }
        write_numbers(options, report)
        print(f"{index}/{len(cells)} {line(rows[-1])}", flush=True)
        torch.cuda.empty_cache()
    torch.cuda.synchronize()
    for bundle in bundles.values():
        bundle.close()
    write_document(options, report)
    print("\n".join([f"a plain copy: {rate} TB/s", *report["claims"], *reasons(rows)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
