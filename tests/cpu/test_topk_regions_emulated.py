"""The patched kernels of top-k, run on the CPU as the library launches them: what they write is what the oracle says.

Every thread of every block runs, in an order that no GPU has; blocks of a group run at once and wait for one another. That
shows that the patches compute what they should and that the waiting ends, not what the memory model of a GPU allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from cpu.emulator.topk_regions import Emulator, launch  # noqa: E402
from cpu.fake_driver.gpu import FakeGpu  # noqa: E402
from cpu.fake_driver.kernseal_library import Kernseal  # noqa: E402
from cpu.fake_driver.topk_regions import FIXED_SMEM, OP, axes_of, library_of  # noqa: E402

from kernseal.kernels.topk_regions.reference import chunk_of, keys, regions  # noqa: E402

pytestmark = pytest.mark.slow

F32, BF16 = torch.float32, torch.bfloat16
VARIANTS = {
    "f32_det": axes_of(),
    "f32": axes_of(deterministic=False),
    "bf16_paged_det": axes_of(dtype="bf16", paged=True),
    "f32_paged": axes_of(paged=True, deterministic=False),
}
SMEM = 101376
LONG = 2 * (SMEM - FIXED_SMEM) // 4 + 77
"""float32 scores that three blocks of SM120 share."""


@pytest.fixture(scope="module")
def library(fake_gpu: FakeGpu, tmp_path_factory: pytest.TempPathFactory) -> Kernseal:
    fake_gpu.reset()
    return library_of(list(VARIANTS.values()), tmp_path_factory.mktemp("topk"), "sm_120a")


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Emulator]:
    made: dict[str, Emulator] = {}

    def get(name: str) -> Emulator:
        if name not in made:
            made[name] = Emulator(VARIANTS[name], tmp_path_factory.mktemp(name))
        return made[name]

    return get


class Rows:
    """Scores between NaN, with what a call says of them."""

    def __init__(
        self, dtype: Any, lengths: list[int], max_len: int, row_stride: int, levels: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(max_len)
        shape = (len(lengths), row_stride)
        values = (
            torch.randint(levels, shape, generator=generator)
            if levels
            else torch.randn(shape, generator=generator)
        )
        self.scores = values.to(dtype)
        self.max_len = max_len
        self.call: dict[str, Any] = {"lengths": torch.tensor(lengths, dtype=torch.int32)}

    def hide_the_rest(self) -> None:
        starts = self.call.get("row_starts", torch.zeros(len(self.scores), dtype=torch.int32))[:, None]
        columns = torch.arange(self.scores.shape[1])
        ends = starts + self.call["lengths"].clamp(0, self.max_len)[:, None]
        self.scores[(columns < starts) | (columns >= ends)] = float("nan")


def run(
    library: Kernseal, gpu: FakeGpu, emulated: Emulator, axes: dict[str, Any], rows: Rows, k: int
) -> None:
    """Launch twice with the same semaphores, and compare with the oracle."""
    rows.hide_the_rest()
    count, stride = len(rows.scores), rows.scores.stride(0)
    expected = regions(
        *(rows.scores, k),
        chunk=chunk_of(
            *(rows.max_len, stride, rows.scores.dtype),
            row_starts="row_starts" in rows.call,
            deterministic=axes["deterministic"],
            smem_per_block=SMEM,
        ),
        max_len=rows.max_len,
        **rows.call,
    )
    semaphores = torch.zeros(1 << 17, dtype=torch.uint8)
    sizes = {"top_k": k, "num_rows": count, "max_len": rows.max_len, "row_stride": stride}
    if axes["paged"]:
        table = rows.call["page_table"]
        sizes |= {"num_requests": table.shape[0], "max_pages": table.shape[1]}
    handle = library.prepare(OP, axes)
    for _ in range(2):
        out = {"indices": torch.full((count, k), 0x5A5A5A5A, dtype=torch.int32)}
        extra = "raw_indices" if axes["paged"] else "values"
        kind = torch.int32 if axes["paged"] else rows.scores.dtype
        out[extra] = torch.full((count, k), 77, dtype=kind)
        scratch = {"semaphores": semaphores, "semaphores_bytes": semaphores.numel()}
        emulated.run(launch(library, gpu, handle, scores=rows.scores, **rows.call, **out, **sizes, **scratch))
        compare(axes, rows, out, expected)
    assert library.c.kseal_topk_regions_release(handle) == 0


def compare(axes: dict[str, Any], rows: Rows, out: dict[str, Any], expected: Any) -> None:
    if axes["deterministic"]:
        for name, written in out.items():
            wanted = getattr(expected, name)
            assert torch.equal(written, wanted) or torch.equal(keys(written), keys(wanted)), name
        return
    for r in range(len(rows.scores)):
        start = int(rows.call["row_starts"][r]) if "row_starts" in rows.call else 0
        raw = out["raw_indices"][r] if axes["paged"] else out["indices"][r]
        live = expected.raw_indices[r] >= 0
        assert torch.equal(raw >= 0, live)
        assert raw[live].unique().numel() == int(live.sum())
        chosen = rows.scores[r, start + raw[live].long()]
        wanted = rows.scores[r, start + expected.raw_indices[r][live].long()]
        assert torch.equal(chosen.sort().values, wanted.sort().values)
        if axes["paged"]:
            size = rows.call["page_size"]
            slots = rows.call["page_table"][r][raw[live].long() // size] * size + raw[live] % size
            assert torch.equal(out["indices"][r][live], slots)
        else:
            assert torch.equal(out["values"][r][live], chosen)
            assert torch.isneginf(out["values"][r][~live]).all()


EDGES = [0, 1, 63, 64, 65, 1023, 1024, 1025, 3000, 2999, -5, 9999]


@pytest.mark.parametrize("levels", [0, 3])
@pytest.mark.parametrize("name", ["f32_det", "f32"])
def test_rows_in_one_block(
    library: Kernseal, gpu: FakeGpu, emulator: Callable[[str], Emulator], name: str, levels: int
) -> None:
    """Also with a stride that no vector divides, where a row begins between two."""
    gpu.device((9, 0), sms=3)
    run(library, gpu, emulator(name), VARIANTS[name], Rows(F32, EDGES, 3000, 3001, levels), 64)


@pytest.mark.parametrize("name", ["f32_det", "f32"])
def test_rows_in_a_group(
    library: Kernseal, gpu: FakeGpu, emulator: Callable[[str], Emulator], name: str
) -> None:
    """One group of three blocks takes long and short rows in turn."""
    gpu.device((9, 0), sms=4)
    lengths = [LONG, 500, 512, LONG // 2, LONG - 1]
    run(library, gpu, emulator(name), VARIANTS[name], Rows(F32, lengths, LONG, LONG + 3, levels=3000), 512)


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("name", ["bf16_paged_det", "f32_paged"])
def test_page_tables(
    library: Kernseal, gpu: FakeGpu, emulator: Callable[[str], Emulator], name: str, long: bool
) -> None:
    gpu.device((9, 0), sms=4)
    axes = VARIANTS[name]
    dtype = BF16 if axes["dtype"] == "bf16" else F32
    size = (LONG * 4 // dtype.itemsize) if long else 2000
    rows = Rows(dtype, [size, 100, 513, size - 5], size, size + 8, levels=3)
    generator = torch.Generator().manual_seed(1)
    rows.call["page_table"] = torch.randint(1000, (4, size // 16 + 2), generator=generator, dtype=torch.int32)
    rows.call["page_size"] = 16
    run(library, gpu, emulator(name), axes, rows, 512)


def test_windows_and_offsets(library: Kernseal, gpu: FakeGpu, emulator: Callable[[str], Emulator]) -> None:
    gpu.device((9, 0), sms=2)
    rows = Rows(F32, [2000, 64, 1999, 70], 2000, 2500, levels=50)
    rows.call["row_starts"] = torch.tensor([0, 1, 7, 499], dtype=torch.int32)
    rows.call["offsets"] = torch.tensor([0, 5, -3, 10**9], dtype=torch.int32)
    run(library, gpu, emulator("f32_det"), VARIANTS["f32_det"], rows, 64)
