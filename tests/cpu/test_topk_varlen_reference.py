"""The oracle of top-k for a decode step: rows of a request, edges, and torch's own top-k; the loader's view of the op."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml

torch = pytest.importorskip("torch", reason="torch is not installed")

from cpu.test_loader_arguments import OnDevice  # noqa: E402

from kernseal.export import paths, spec  # noqa: E402
from kernseal.kernels.topk_varlen.operands import SPEC  # noqa: E402
from kernseal.kernels.topk_varlen.reference import decode, row_lengths  # noqa: E402
from kernseal.loader.binder import Binder  # noqa: E402
from kernseal.loader.errors import InvalidArgument  # noqa: E402
from kernseal.loader.layout import Layout  # noqa: E402
from kernseal.loader.library import declarations  # noqa: E402

FOLDER = paths.kernels() / "topk_varlen"
KERNEL = yaml.safe_load((FOLDER / "kernel.yaml").read_text())
ARGS = Layout(declarations(), "kseal_topk_varlen_args")
CONFIG = {**SPEC.config_defaults, "device": 0, "values": True}
B, NEXT, N, K = 3, 2, 100, 8


def test_rows_of_a_request_see_one_token_more_each() -> None:
    """As a naive walk over the positions that a token may look at."""
    for next_n, ratio in ((1, 1), (3, 1), (2, 4), (4, 128)):
        tokens = [0, 1, 2, 5, 127, 128, 129, 1000, -4]
        found = row_lengths(torch.tensor(tokens), next_n, ratio, 900)
        naive = []
        for total in tokens:
            for token in range(next_n):
                seen = [p for p in range(max(total, 0)) if p <= total - next_n + token]
                naive.append(min(len(seen) // ratio, 900))
        assert found == naive


def test_the_largest_are_those_of_torch() -> None:
    scores = torch.randn(6, 3000, generator=torch.Generator().manual_seed(2))
    indices, values = decode(scores, torch.tensor([3000, 2000, 101]), 100, next_n=2)
    for r, length in enumerate((2999, 3000, 1999, 2000, 100, 101)):
        expected = scores[r, :length].topk(100).values
        assert torch.equal(values[r].sort(descending=True).values, expected)
        assert torch.equal(scores[r, indices[r].long()], values[r])
    assert indices[4].tolist() == list(range(100))


def test_rows_that_are_not_filled_end_with_minus_one() -> None:
    indices, values = decode(torch.arange(12.0).reshape(3, 4), torch.tensor([0, 2, 9]), 4)
    assert indices.tolist() == [[-1] * 4, [0, 1, -1, -1], [0, 1, 2, 3]]
    assert values.tolist() == [[-math.inf] * 4, [4.0, 5.0, -math.inf, -math.inf], [8.0, 9.0, 10.0, 11.0]]


def values_of(**changes: Any) -> dict[str, Any]:
    made = {
        "scores": torch.zeros(B * NEXT, N),
        "seq_lens": torch.zeros(B, dtype=torch.int32),
        "indices": torch.zeros(B * NEXT, K, dtype=torch.int32),
        "values": torch.zeros(B * NEXT, K),
        "semaphores": torch.zeros(100, dtype=torch.uint8),
        "next_n": NEXT,
        **changes,
    }
    wrapped = {name: OnDevice(t) if isinstance(t, torch.Tensor) else t for name, t in made.items()}
    return Binder(ARGS, SPEC, CONFIG).values({**wrapped, "stream": 0})


def test_operands_are_the_pointers_of_the_op_and_the_rest_its_fields() -> None:
    fields = {f["name"]: f["type"] for f in KERNEL["abi"]["args"]}
    operands = SPEC.operands(CONFIG)
    assert set(operands) == {name for name, kind in fields.items() if kind.startswith("ptr")}
    assert set(SPEC.args_defaults) <= set(fields)
    assert ARGS.names == tuple(fields)


def test_sizes_and_strides_follow_from_tensors() -> None:
    found = values_of(scores=torch.zeros(B * NEXT, 128)[:, :N])
    expected = {"num_requests": B, "max_len": N, "top_k": K, "row_stride": 128, "semaphores_bytes": 100}
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scores": torch.zeros(B, N)}, r"scores: shape \(3, 100\)"),
        ({"values": torch.zeros(B * NEXT, K + 1)}, r"values: shape \(6, 9\)"),
        ({"seq_lens": torch.zeros(B, dtype=torch.int64)}, "seq_lens: .*i64"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        values_of(**changes)


def test_the_description_and_the_profiles_agree() -> None:
    assert KERNEL["defaults"].items() <= SPEC.config_defaults.items()
    op = spec.load_op(FOLDER)
    sms = ("sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a")
    targets = [*(spec.Target(sm) for sm in sms), spec.Target("sm_120a", "sm_90a")]
    ids = [[v.id for v in op.variants(t, "default")] for t in targets]
    assert ids == [ids[0]] * len(targets)
    assert sorted(ids[0]) == ["bf16", "bf16_values", "f32", "f32_values"]
    for variant in op.variants(targets[0], "full"):
        assert SPEC.variant(dict(variant.axes)) == variant.id


def test_classes_have_the_shared_memory_of_their_sms() -> None:
    limits = yaml.safe_load((paths.kernels() / "sms.yaml").read_text())
    for cls in KERNEL["classes"].values():
        assert {limits[sm]["max_smem_per_block"] for sm in cls["sms"]} == {cls["smem_per_block"]}
