"""GDN prefill from Python with torch: a complete program in one file.

    python gdn_prefill.py BUNDLE [KEY ...]

BUNDLE is a bundle's folder, such as dist/sm_90a-linux-x86_64. The pins or keys of the installed package must vouch for it
or, where public keys are named, one of those.
"""

from __future__ import annotations

import sys
from pathlib import Path

# README: begin
import torch

import kernseal

# README: end
from kernseal.loader.errors import KernsealError
from kernseal.loader.policy import Policy

T, D = 2, 128


def on_gpu(values: list[float], *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device="cuda").reshape(shape)


def run(folder: str, policy: Policy) -> None:
    # One sequence of two tokens and one head. k picks column 0, then column 1 of the state; q reads column 0, then both.
    q, k, v, o = (torch.zeros(T, 1, D, dtype=torch.bfloat16, device="cuda") for _ in range(4))
    q[0, 0, 0] = q[1, 0, :2] = k[0, 0, 0] = k[1, 0, 1] = 1
    v.fill_(1)
    alpha = on_gpu([1, 0.5], T, 1)  # linear: exp(g), not g
    beta = on_gpu([1, 0.25], T, 1)
    before, after = (torch.zeros(1, 1, D, D, device="cuda") for _ in range(2))
    ends = on_gpu([0, T], 2, dtype=torch.int64)

    # README: begin
    with kernseal.open(folder, policy=policy) as bundle:  # verified: pins or trusted signature
        gdn = bundle.prepare("gdn_prefill", dtype="bf16", device=0)  # variant picked, hashed, loaded
        workspace = torch.empty(gdn.workspace_size(), dtype=torch.uint8, device="cuda")
        # Sizes and strides follow from the tensors, and the stream is torch's current one.
        gdn(
            q=q,
            k=k,
            v=v,
            o=o,
            alpha=alpha,
            beta=beta,
            initial_state=before,
            final_state=after,
            cu_seqlens=ends,
            scale=1.0,
            workspace=workspace,
        )
        torch.cuda.synchronize()  # launches must have finished when the bundle closes
    # README: end

    # The first token stored 1 in column 0. The second halved that, stored 1/4 in column 1, and read both.
    torch.testing.assert_close(o[:, 0].float(), on_gpu([1, 0.75], T, 1).expand(T, D), rtol=0, atol=1e-2)
    state = torch.zeros(D, D, device="cuda")
    state[:, 0], state[:, 1] = 0.5, 0.25
    torch.testing.assert_close(after[0, 0], state, rtol=0, atol=1e-2)
    print("ok: two tokens of GDN prefill, output and state as expected")


def main(arguments: list[str]) -> int:
    if not arguments:
        print("usage: gdn_prefill.py BUNDLE [KEY ...]", file=sys.stderr)
        return 1
    if not torch.cuda.is_available():
        print(f"no GPU: torch {torch.__version__} sees none", file=sys.stderr)
        return 1
    folder, *keys = arguments
    try:
        run(folder, Policy.from_options(keys=[Path(key) for key in keys]))
    except (KernsealError, AssertionError) as error:
        print(f"{getattr(error, 'status', 'wrong result')}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
