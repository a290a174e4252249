"""GDN decode problems: inputs, what must come of them, and a run through the loader's generic call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernseal.kernels.gdn_decode.operands import SPEC
from kernseal.kernels.gdn_decode.reference import Result, gated_delta_rule_decode
from kernseal.loader.bundle import Bundle
from kernseal.loader.op import Op

OP = "gdn_decode"
D = 128
SCALE = 1 / math.sqrt(D)
BF16 = torch.bfloat16
INDEX = {"i32": torch.int32, "i64": torch.int64}
LIMIT = 5e-3
"""Relative error of outputs and states: both are rounded to bfloat16, and the kernels' exponentials are approximate."""


DEFAULTS = {name: SPEC.config_defaults[name] for name in SPEC.tags}


def axes_of(**changes: Any) -> dict[str, Any]:
    return {**DEFAULTS, **changes}


def axes_in(bundle: Bundle) -> list[dict[str, Any]]:
    """Of each variant of this op."""
    kinds = {name: type(value) for name, value in DEFAULTS.items()}
    read = {str: str, int: int, bool: lambda text: text == "1"}
    return [
        {name: read[kinds[name]](text) for name, text in variant.axes.items()}
        for variant in bundle.variants()
        if variant.op == OP
    ]


@dataclass
class Problem:
    """One call. Tensors of tokens are [B, T, ..]; ``pool`` is [rows, Hv, V, K] in logical order.

    Attributes:
        written: rows for the final states; None where they are those that are read.
    """

    axes: Mapping[str, Any]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    pool: torch.Tensor
    rows: torch.Tensor
    written: torch.Tensor | None = None
    scale: float = SCALE

    @property
    def batch(self) -> int:
        return self.rows.shape[0]

    @property
    def hv(self) -> int:
        return self.v.shape[2]

    @property
    def alive(self) -> torch.Tensor:
        """Which sequences have a state."""
        return (self.rows >= 0) & (self.rows < self.pool.shape[0])

    def sequences(self, chosen: Sequence[int]) -> Problem:
        """The same call with these sequences only, in this order."""
        index = torch.tensor(chosen, dtype=torch.int64, device=self.q.device)
        own = {name: getattr(self, name)[index] for name in ("q", "k", "v", "a", "b", "rows")}
        written = None if self.written is None else self.written[index]
        return replace(self, pool=self.pool.clone(), written=written, **own)

    def reference(self) -> Result:
        tensors = (self.q, self.k, self.v, self.a, self.b, self.a_log, self.dt_bias, self.pool, self.rows)
        return gated_delta_rule_decode(*tensors, scale=self.scale, qk_l2norm=self.axes["qk_l2norm"])


def make(
    axes: Mapping[str, Any],
    rows: Sequence[int],
    written: Sequence[int] | None = None,
    *,
    heads: tuple[int, int] = (2, 4),
    pool_rows: int = 16,
    device: str = "cuda",
    seed: int = 0,
) -> Problem:
    """The same numbers on any device. Gates from nearly closed to nearly open, and above softplus's threshold."""
    rng = torch.Generator().manual_seed(1000 * seed + 10 * len(rows) + axes["tokens"])
    (hq, hv), b, t = heads, len(rows), axes["tokens"]

    def normal(*shape: int, spread: float = 1.0) -> torch.Tensor:
        return (spread * torch.randn(shape, generator=rng)).to(BF16).to(device)

    q, k = normal(b, t, hq, D), normal(b, t, hq, D)
    if not axes["qk_l2norm"]:
        q, k = (torch.nn.functional.normalize(x.float(), dim=-1).to(BF16) for x in (q, k))
    a = normal(b, t, hv, spread=3.0)
    if b:
        a[0, 0, 0] = 40.0
    index = INDEX[axes["index_dtype"]]
    return Problem(
        axes=dict(axes),
        q=q,
        k=k,
        v=normal(b, t, hv, D),
        a=a,
        b=normal(b, t, hv, spread=2.0),
        a_log=torch.linspace(-4.0, 1.0, hv).to(device),
        dt_bias=torch.linspace(-3.0, 1.0, hv).to(device),
        pool=normal(pool_rows, hv, D, D, spread=0.3),
        rows=torch.tensor(rows, dtype=index, device=device),
        written=None if written is None else torch.tensor(written, dtype=index, device=device),
    )


def blank(*shape: int, device: str = "cuda") -> torch.Tensor:
    """Memory in which an element that was not written shows."""
    return torch.full(shape, math.nan, dtype=BF16, device=device)


def padded(x: torch.Tensor, spare: int) -> torch.Tensor:
    """The same numbers as columns of a wider tensor whose other columns are NaN; [B * T, ..] or [rows, ..]."""
    wide = torch.full((x.shape[0], x[0].numel() + spare), math.nan, dtype=x.dtype, device=x.device)
    view = wide[:, : x[0].numel()].unflatten(1, x.shape[1:])
    view.copy_(x)
    return view


@dataclass
class Outcome:
    """What a run left behind."""

    output: torch.Tensor
    pool: torch.Tensor
    steps: torch.Tensor | None


class Runner:
    """A prepared variant."""

    def __init__(self, bundle: Bundle, axes: Mapping[str, Any]) -> None:
        self.axes = axes
        self.op: Op = bundle.prepare(OP, device=0, **axes)

    def arguments(self, p: Problem, spare_steps: int = 0, **changes: Any) -> dict[str, Any]:
        """Every argument of ``Op.run`` but the stream, with fresh outputs; the pool is the problem's own."""
        args: dict[str, Any] = {name: getattr(p, name).flatten(0, 1) for name in ("q", "k", "v", "a", "b")}
        args |= {"a_log": p.a_log, "dt_bias": p.dt_bias, "state": p.pool, "state_indices": p.rows}
        args |= {"o": blank(*args["v"].shape), "scale": p.scale}
        if p.written is not None:
            args["output_state_indices"] = p.written
        if self.axes["intermediate_states"]:
            args["intermediate_states"] = blank(p.batch, self.axes["tokens"] + spare_steps, p.hv, D, D)
        return {**args, **changes}

    def launch(self, args: Mapping[str, Any]) -> None:
        self.op.run(**args, stream=torch.cuda.current_stream())

    def run(self, p: Problem, **changes: Any) -> Outcome:
        """Run on a pool of its own and wait."""
        args = self.arguments(replace(p, pool=p.pool.clone()), **changes)
        self.launch(args)
        torch.cuda.synchronize()
        output = args["o"].unflatten(0, (p.batch, p.axes["tokens"]))
        return Outcome(output, args["state"], args.get("intermediate_states"))


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    """The worst ||got - want|| / ||want|| of what one head has at one token, tiny ones aside; infinite if not finite."""
    if want.numel() == 0:
        return 0.0
    if not bool(got.isfinite().all()):
        return math.inf
    got, want = got.double().flatten(3), want.double().flatten(3)
    scale = want.norm(dim=-1).clamp(min=1e-3 * float(want.norm(dim=-1).max()))
    return float(((got - want).norm(dim=-1) / scale).max())


def check(p: Problem, got: Outcome) -> None:
    """Everything that ``kernel.yaml`` says of a run, against the oracle and what was there before."""
    want, alive, tokens = p.reference(), p.alive, p.axes["tokens"]
    assert error_of(got.output[alive], want.output[alive]) <= LIMIT
    assert not bool(got.output[~alive].count_nonzero()), "the output of padding is not zero"
    if got.steps is not None:
        assert error_of(got.steps[alive, :tokens], want.states[alive]) <= LIMIT
        assert bool(got.steps[~alive].isnan().all()), "a state of padding was stored"
        assert bool(got.steps[:, tokens:].isnan().all()), "a step that no token has was stored"
    expected = p.pool.double()
    if p.axes["update_state"]:
        rows = p.rows if p.written is None else p.written
        stored = alive & (rows >= 0) & (rows < p.pool.shape[0])
        rows = rows[stored].long()
        assert error_of(got.pool[rows][:, None], want.states[stored, -1][:, None]) <= LIMIT
        expected[rows] = got.pool[rows].double()
    assert torch.equal(got.pool.double(), expected), "a row that is nobody's changed"
