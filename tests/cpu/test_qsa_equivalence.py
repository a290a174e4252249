"""A launch of QSA attention is, byte for byte, the launch of CuTe's own host object through CuTe's own runtime."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cpu.fake_driver import qsa
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.host_objects import HostObject
from cpu.fake_driver.kernseal_library import compiled_library
from cpu.fake_driver.qsa import OP, Call, random_call
from cpu.fake_driver.reference import Reference, Scalar, Tensor, masked

pytestmark = pytest.mark.slow

CASES = 40
VARIANTS: dict[str, dict[str, Any]] = {
    "single_split": {"splits": 4, "heads_per_kv": 8, "tile_q": 8, "head_dim": 128},
    "grouped_fp8_flat_split": {
        "dtype": "e4m3",
        "grouped": True,
        "tile_q": 64,
        "splits": 6,
        "flat_kv_heads": 2,
    },
}


def arguments(p: Call) -> dict[str, Tensor | Scalar]:
    """What upstream's Python passes, by the names of the recipe's host function."""
    grouped, capacity = p.axes["grouped"], p.page_capacity
    routes, rows, words = p["num_routes"], p["total_q"], -(-capacity // 4)
    page, head, token = p.strides
    partial = p["workspace"]
    stats = partial + -(-p.split_rows * p.axes["head_dim"] * 2 // 256) * 256
    if grouped:
        selected = Tensor(p["page_indices"], (routes, capacity), (capacity,))
        pages = Tensor(p["memberships"], (routes, words), (words,))
        requests = positions = Tensor(p["kv_lens"], (routes,))
    else:
        stride = p["block_indices_stride"] or p["block_topk"]
        selected = Tensor(p["block_indices"], (rows, p["block_topk"]), (stride,))
        columns = p["max_pages_per_request"]
        table = (p["block_table_stride"] or columns,)
        pages = Tensor(p["block_table"], (p["num_requests"], columns), table)
        requests = Tensor(p["token_to_request"], (rows,))
        positions = Tensor(p["query_positions"], (rows,))
    whole = {
        "num_routes": routes,
        "num_kv_heads": p["num_kv_heads"],
        "q_capacity": p["group"],
        "kv_capacity": p.kv_capacity,
        "page_capacity": capacity,
        "max_seq_len": p["max_seq_len"],
    }
    strides = {"page": page, "head": head, "token": token}
    return {
        "q": Tensor(p["q"], (rows,)),
        "k": Tensor(p["k"], (1,)),
        "v": Tensor(p["v"], (1,)),
        "o": Tensor(p["o"], (rows,)),
        "qo_indptr": Tensor(p["qo_indptr"], (routes + 1,)),
        "selected": selected,
        "pages": pages,
        "requests": requests,
        "positions": positions,
        "partial_o": Tensor(partial, (1,)),
        "partial_stats": Tensor(stats, (1,)),
        **{name: Scalar("int32_t", value) for name, value in whole.items()},
        "num_pages": Scalar("int64_t", p["num_pages"]),
        **{f"{x}_{name}_stride": Scalar("int64_t", s) for x in "kv" for name, s in strides.items()},
        "softmax_scale": Scalar("float", p["scale"]),
        "output_scale": Scalar("float", p["out_scale"]),
        "stream": Scalar("void *", p["stream"]),
    }


def without_padding(mask: bytes) -> bytes:
    """A vector is an address and an extent of 4 bytes; what is behind it is whatever the call before left on the stack."""
    return mask[:12] + bytes(4) if len(mask) == 16 else mask


@pytest.mark.parametrize("name", VARIANTS)
def test_our_launches_are_cutes_launches(
    built_variant: Callable[..., HostObject], gpu: FakeGpu, tmp_path: Path, name: str
) -> None:
    made = built_variant("sm_100a", op_name=OP, **VARIANTS[name])
    axes = made.variant.axes
    reference = Reference(made, tmp_path / "reference")
    gpu.device((10, 0), sms=148)
    library = compiled_library([made], tmp_path / "ours")
    reference.load()
    theirs = gpu.log("set_attribute")
    handle = library.prepare(OP, axes)
    assert gpu.log("set_attribute") == theirs * 2, "kernel attributes differ"

    entries = [entry for entry, _ in made.answer.kernels]
    assert len(entries) == 2
    for index, entry in enumerate(entries):
        gpu.params(made.param_sizes(index), entry)
    rng = random.Random(name)
    for case in range(CASES):
        call = random_call(rng, axes)
        status = library.c.kseal_qsa_attention_run(handle, call.args(library))
        assert status == 0, library.error()
        ours = gpu.log("launch")[-2:]
        expected = reference.launches(gpu, arguments(call))
        assert [launch["kernel"] for launch in ours] == entries
        for mine, (its, mask) in zip(ours, expected, strict=True):
            known = [without_padding(m) for m in mask]
            assert masked(mine, known) == masked(its, known), f"case {case}: {call}"
            check_grid(mine, call, entries)
    assert library.c.kseal_qsa_attention_release(handle) == 0
    library.close()


def check_grid(launch: dict[str, Any], call: Call, entries: list[str]) -> None:
    """What the grids are, from the sizes: CuTe's own code would not notice a wrong count of routes or splits."""
    if launch["kernel"] == entries[0]:
        assert launch["grid"] == [call.axes["splits"], call["num_kv_heads"], call["num_routes"]]
    else:
        assert launch["grid"][1:] == [call["num_kv_heads"], call["num_routes"]]


def test_the_names_of_the_pointers_are_those_of_the_op() -> None:
    named = {f["name"] for f in qsa.op().data["abi"]["args"] if f["type"].startswith("ptr")}
    assert named == set(qsa.POINTERS) - {"stream"}
