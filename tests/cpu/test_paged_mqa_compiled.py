"""What can be seen of the compiled kernels of paged MQA logits without running them: no one has run those of SM100 here."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from cpu.fake_driver.host_objects import HostObject
from cpu.fake_driver.paged_mqa import LOGITS, SCHEDULE
from cpu.fake_driver.paged_mqa_upstream import SMEM, upstream
from elftools.elf.elffile import ELFFile

from kernseal.export import elf

pytestmark = pytest.mark.slow

MATH_THREADS, OTHER_THREADS = 256, 128
FP8: list[dict[str, Any]] = [{}, {"num_heads": 8, "head_dim": 256, "page_size": 32, "next_n": 3}]
FP4 = {"kv_dtype": "fp4", "out_dtype": "bf16", "next_n": 4}
DSA = {"num_heads": 32, "next_n": 3}


def entry_of(made: HostObject) -> elf.Entry:
    (found,) = elf.read(made.cubin).entries.values()
    return found


def instructions(made: HostObject, pattern: str) -> Counter[str]:
    return Counter(re.findall(pattern, made.ptx))


@pytest.mark.parametrize("axes", FP8, ids=["64x128", "8x256"])
def test_fp8_fits_and_multiplies_on_the_tensor_core(
    built_variant: Callable[..., HostObject], axes: dict[str, Any]
) -> None:
    made = built_variant("sm_100a", op_name=LOGITS, **axes)
    entry, full = entry_of(made), made.variant.axes
    columns = full["next_n"] * full["num_heads"]
    ((_, smem),) = made.answer.kernels
    assert smem == upstream()._fp8_smem_bytes(128, full["head_dim"], columns, 4) <= SMEM
    assert entry.frame == 0
    kinds = instructions(made, r"tcgen05\.mma\.cta_group::1\.kind::(\w+)")
    assert set(kinds) == {"f8f6f4"}
    # Two warps issue the products, each head_dim / 32 of them a tile.
    assert kinds["f8f6f4"] % (full["head_dim"] // 32) == 0 and kinds["f8f6f4"] >= 2 * (full["head_dim"] // 32)
    assert not instructions(made, r"\b(wgmma|mma\.sync)\b")


def test_fp4_fits_and_multiplies_in_blocks(built_variant: Callable[..., HostObject]) -> None:
    made = built_variant("sm_100a", op_name=LOGITS, **FP4)
    ((_, smem),) = made.answer.kernels
    assert smem <= SMEM and entry_of(made).frame == 0
    assert set(instructions(made, r"tcgen05\.mma\.cta_group::1\.kind::(\w+)")) == {"mxf4nvf4"}
    assert instructions(made, r"(tcgen05\.cp)\b") and not instructions(made, r"\b(wgmma|mma\.sync)\b")


@pytest.mark.parametrize("axes", [*FP8, FP4], ids=["64x128", "8x256", "fp4"])
def test_registers_that_warps_hand_over_are_there(
    built_variant: Callable[..., HostObject], axes: dict[str, Any]
) -> None:
    """Where the assembler keeps setmaxnreg, what the math warps ask for is what the CTA was launched with."""
    made = built_variant("sm_100a", op_name=LOGITS, **axes)
    entry = entry_of(made)
    asked = {k: int(n) for k, n in re.findall(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32\s+(\d+)", made.ptx)}
    wanted = asked["inc"] * MATH_THREADS + asked["dec"] * OTHER_THREADS
    kept = hands_over(made.cubin)
    assert kept == (entry.registers == 168)
    assert not kept or wanted <= entry.registers * (MATH_THREADS + OTHER_THREADS)


def hands_over(cubin: bytes) -> bool:
    """Whether the code has USETMAXREG: 0x9c8 in the low bits of an instruction of 16 bytes."""
    file = ELFFile(io.BytesIO(cubin))
    (text,) = (s.data() for s in file.iter_sections() if s.name.startswith(".text."))
    return any(int.from_bytes(text[at : at + 2], "little") & 0xFFF == 0x9C8 for at in range(0, len(text), 16))


def test_schedules_of_every_batch_are_one_kernel_that_spills_nothing(
    built_variant: Callable[..., HostObject],
) -> None:
    made = built_variant("sm_100a", op_name=SCHEDULE)
    entry = entry_of(made)
    assert entry.frame == 0 and entry.registers <= 64
    assert made.answer.kernels[0][1] == 4 * 8192
    assert instructions(made, r"\b(bar\.warp\.sync)\b")


@pytest.mark.parametrize(
    ("retarget", "product"),
    [(None, "kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32"), ("sm_90a", "m16n8k32")],
)
def test_the_scorer_has_the_products_of_its_sm(
    built_variant: Callable[..., HostObject], retarget: str | None, product: str
) -> None:
    made = built_variant("sm_120a", retarget, op_name=LOGITS, **DSA)
    found = instructions(made, r"mma\.sync\.aligned\.(\S+?)\.row\.col\.f32\.e4m3\.e4m3\.f32")
    assert found == {product: 4}
    assert entry_of(made).frame == 0
    assert instructions(made, r"(fence\.mbarrier_init)")
