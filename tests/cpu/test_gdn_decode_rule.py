"""Which kernel serves a batch: our rule is what upstream's own functions do, over every size of work and device."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import yaml

from kernseal.export import paths, source
from kernseal.kernels.gdn_decode.rule import Kernel, kernel_for

torch = pytest.importorskip("torch", reason="torch is not installed")

FOLDER = paths.kernels() / "gdn_decode"
MODULE = "flashinfer/gdn_kernels/gdn_decode_bf16_state.py"
FUNCTIONS = {
    "gated_delta_rule",
    "gated_delta_rule_mtp",
    "_select_tile_v_for_mtp",
    "_get_bf16_mtp_config",
    "_select_wide_vec_tile_v",
}
THRESHOLD = "_WIDE_VEC_WORK_UNITS_THRESHOLD"
SMS = (20, 30, 36, 48, 64, 84, 114, 127, 128, 132, 148, 152, 160, 170, 188, 192, 256, 300)
"""From the smallest SM120 device to more than there is."""


class Chosen(Exception):
    """Upstream has decided."""


def _chooses(wide: bool) -> Callable[..., Any]:
    def called(**arguments: Any) -> None:
        raise Chosen(Kernel(wide, arguments["tile_v"]))

    return called


@pytest.fixture(scope="module")
def upstream() -> dict[str, Any]:
    """Upstream's dispatching functions, with nothing behind them: what they choose is raised."""
    opened, _ = source.open_source(None, source.upstream())
    text = source.read_set(opened, source.source_set(FOLDER))[MODULE].decode()
    kept = [
        node
        for node in ast.parse(text).body
        if (isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS)
        or (isinstance(node, ast.Assign) and any(ast.unparse(t) == THRESHOLD for t in node.targets))
    ]
    assert len(kept) == len(FUNCTIONS) + 1
    space: dict[str, Any] = {
        "torch": torch,
        "math": __import__("math"),
        "Optional": Optional,
        "as_bf16": lambda *tensors: tensors,
        "gated_delta_rule_t1_wide_vec": _chooses(True),
        "gated_delta_rule_mtp_wide_vec": _chooses(True),
    }
    exec(compile(ast.Module(kept, []), MODULE, "exec"), space)
    picked = space["_get_bf16_mtp_config"]

    def narrow(*sizes: int, **device: int) -> None:
        tile, rows = picked(*sizes, **device)
        assert rows == 4
        raise Chosen(Kernel(False, tile))

    return {**space, "narrow": narrow}


def choice(upstream: dict[str, Any], tokens: int, batch: int, hv: int, sms: int) -> Kernel:
    """What upstream launches for a call of its public function."""
    run = upstream["gated_delta_rule" if tokens == 1 else "gated_delta_rule_mtp"]
    run.__globals__["_get_bf16_mtp_config"] = upstream["narrow"]
    run.__globals__["gdn_device_target"] = lambda device: SimpleNamespace(num_sms=sms)
    tensor = SimpleNamespace(dtype=torch.bfloat16, device="cuda")
    heads = SimpleNamespace(shape=(batch, tokens, 1, 128), **vars(tensor))
    pool = SimpleNamespace(
        shape=(batch, hv, 128, 128), __getitem__=None, stride=lambda: (1, 1, 1, 1), **vars(tensor)
    )
    try:
        run(
            A_log=None,
            a=tensor,
            dt_bias=None,
            q=heads,
            k=heads,
            v=SimpleNamespace(shape=(batch, tokens, hv, 128)),
            b=tensor,
            initial_state_source=_Pool(pool),
            initial_state_indices=object(),
        )
    except Chosen as chosen:
        found: Kernel = chosen.args[0]
        return found
    raise AssertionError("upstream chose nothing")


class _Pool:
    """A pool that may be cut, as upstream does for an argument that it does not need."""

    def __init__(self, like: SimpleNamespace) -> None:
        self.shape, self.dtype, self.device = like.shape, like.dtype, like.device

    def __getitem__(self, _: object) -> _Pool:
        return self


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_the_rule_is_upstreams(upstream: dict[str, Any], tokens: int) -> None:
    rng = random.Random(tokens)
    works = [*range(1, 1100), *(rng.randrange(1100, 2**22) for _ in range(50))]
    for sms in SMS:
        for work in works:
            divisors = [hv for hv in (1, 2, 4, 8, 16, 24, 32, 48, 64) if work % hv == 0]
            hv = rng.choice(divisors)
            ours = kernel_for(tokens, work, sms)
            assert ours == choice(upstream, tokens, work // hv, hv, sms), (tokens, work, hv, sms)


def test_every_kernel_of_the_rule_can_be_built_and_is_in_the_default_profile() -> None:
    from kernseal.export import spec

    op = spec.load_op(FOLDER)
    for sm in ("sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a"):
        built = op.variants(spec.Target(sm), "default")
        have = {(v.axes["tokens"], v.axes["wide"], v.axes["tile_v"]) for v in built}
        for tokens in (1, 2, 3, 4):
            wanted = {kernel_for(tokens, work, sms) for work in range(1, 1100) for sms in SMS}
            assert {(tokens, *kernel) for kernel in wanted} <= have


def test_the_sentence_in_the_semantics_is_the_rule() -> None:
    """Read as a program: ``W < 512: narrow 128 if W >= 4 * SMs, else ...; else wide 128``."""
    (sentence,) = [
        s for s in yaml.safe_load((FOLDER / "kernel.yaml").read_text())["semantics"] if "Upstream's rule" in s
    ]
    parts = sentence.split("number of SMs. ")[1]
    one, several = parts.removeprefix("T = 1: ").split(" T > 1: ")
    for tokens, text in ((1, one), (2, several)):
        for work in range(1, 1100):
            for sms in SMS:
                assert kernel_for(tokens, work, sms) == _read(text.rstrip("."), work, sms)


def _read(text: str, work: int, sms: int) -> Kernel:
    for clause in text.split("; "):
        condition, _, kernels = clause.rpartition(": ")
        if condition and not eval(condition, {"W": work}):
            continue
        for option in kernels.split(", "):
            kernel, _, when = option.removeprefix("else ").partition(" if ")
            if not when or eval(when, {"W": work, "SMs": sms}):
                name, tile = kernel.split()
                return Kernel(name == "wide", int(tile))
    raise AssertionError(text)
