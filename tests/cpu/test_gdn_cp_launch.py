"""Context-parallel GDN prefill on the recording driver: what is launched, and what is refused in which words."""

from __future__ import annotations

import ast
import functools
import random
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from cpu.fake_driver.gdn_cp import (
    ALIGN,
    OP,
    Call,
    D,
    axes_of,
    library_of,
    random_call,
    upstream_rules,
    upstream_text,
)
from cpu.fake_driver.gpu import FakeGpu
from cpu.fake_driver.host_objects import HostObject
from cpu.fake_driver.kernseal_library import Kernseal, compiled_library
from cpu.fake_driver.reference import Reference, Scalar, Tensor, masked, params_of

PLAIN = axes_of()
POOLED = axes_of(pooled=True, index_dtype="i32", checkpoints=True)
ZERO = axes_of(initial_state=False, state_layout="hkv")
SMS = 132


def workspace_of(c: Call, sms: int, capability: tuple[int, int], device: str) -> dict[str, int]:
    """Where the parts of the workspace begin, by upstream's own rules: ``end`` is its size."""
    rules, h, tokens, seqs = upstream_rules(), c.heads, max(c["total_tokens"], 1), c["num_seqs"]
    longest = max(c["max_seqlen"] or c["total_tokens"], 1)
    chunk_len = c["chunk_len"] or rules.choose_cp_chunk_len_host(
        longest, h, sms, device_capability=capability, total_seqlen=tokens, num_seqs=seqs, device_name=device
    )
    blocks = max(rules.chunk_bound_host(seqs, c["total_tokens"], 64), 1)
    chunks = max(rules.chunk_bound_host(seqs, c["total_tokens"], chunk_len), 1)
    parts = [
        ("t", 128 * sms),
        ("transfer", blocks * h * 64 * 64 * 2),
        *((name, chunks * h * D * D * 4) for name in ("added", "fixed", "gathered")),
        ("end", seqs * h * D * D * 4 if c.axes["initial_state"] else 0),
    ]
    found, at = {"chunk_len": chunk_len, "t_blocks": blocks, "chunks": chunks}, 0
    for name, size_before in parts:
        at += size_before
        found[name] = at
    return found | {
        "max_t_blocks": rules.max_num_chunks_host(longest, 64),
        "max_chunks": rules.max_num_chunks_host(longest, chunk_len),
    }


# ---- launches, beside CuTe's own host object ----

VARIANTS = [
    ("sm_90a", (9, 0), "NVIDIA H200", {"pooled": True, "index_dtype": "i32", "checkpoints": True}),
    ("sm_120a", (12, 0), "NVIDIA GeForce RTX 5090", {"initial_state": False, "state_layout": "hkv"}),
]
CASES = 40
FIXUP_CTAS = {"FixupSimt": (32, 16), "FixupHmma": (2, 2)}


def cute_arguments(c: Call, cut: Mapping[str, int]) -> dict[str, Tensor | Scalar]:
    """What the arguments of ``Pipeline`` are for this call, with a dummy base where there are no tokens."""
    t, h, n, axes = max(c["total_tokens"], 1), c.heads, c["num_seqs"], c.axes
    base = c["workspace"]
    rows = c["pool_rows"] if axes["pooled"] else n
    counts = {"q": c["num_q_heads"], "k": c["num_k_heads"], "v": c["num_v_heads"], "o": h}
    checkpoints = c["total_checkpoints"] if axes["checkpoints"] else 1
    chunk_floats = cut["chunks"] * h * D * D

    def state(name: str) -> Tensor:
        return Tensor(c[name], (rows, h), (c[f"{name}_stride"] or h * D * D,))

    return {
        **{
            name: Tensor(c[name] or base, (t, count), (c[f"{name}_token_stride"] or count * D,))
            for name, count in counts.items()
        },
        "alpha": Tensor(c["alpha"] or base, (t * h,)),
        "beta": Tensor(c["beta"] or base, (t * h,)),
        "final_state": state("final_state"),
        "initial_state": state("initial_state"),
        "read_rows": Tensor(c["state_indices"], (n,)),
        "write_rows": Tensor(c["output_state_indices"] or c["state_indices"], (n,)),
        "checkpoints": Tensor(c["checkpoints"], (checkpoints * h * D * D,)),
        "checkpoint_cu_starts": Tensor(c["checkpoint_cu_starts"], (n + 1,)),
        "t": Tensor(base + cut["t"], (cut["t_blocks"] * h * 64 * 64,)),
        **{name: Tensor(base + cut[name], (chunk_floats,)) for name in ("transfer", "added", "fixed")},
        "gathered": Tensor(base + cut["gathered"], (n * h * D * D,)),
        "tensor_maps": Tensor(base, (cut["t"],)),
        "cu_seqlens": Tensor(c["cu_seqlens"], (n + 1,)),
        "scale": Scalar("float", c["scale"]),
        "num_heads": Scalar("int32_t", h),
        "total_checkpoints": Scalar("int32_t", checkpoints),
        **{
            name: Scalar("int32_t", c[name])
            for name in ("num_q_heads", "num_k_heads", "num_v_heads", "num_seqs", "checkpoint_every")
        },
        **{
            name: Scalar("int32_t", cut[name])
            for name in ("chunk_len", "t_blocks", "max_t_blocks", "chunks", "max_chunks")
        },
        "stream": Scalar("void *", c["stream"]),
    }


def set_bytes(
    params: list[bytes], masks: list[bytes], arguments: Mapping[str, Tensor | Scalar]
) -> list[bytes]:
    """``masks`` without what CuTe's host code leaves unset although two calls may find the same there: of several
    launches, each runs over what the one before left on the stack. That is the second half of a tensor map, and 4 bytes
    after a vector."""
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    vectors = {struct.pack("<Qi", t.data, t.shape[0]) for t in tensors if len(t.shape) == 1}
    found = []
    for param, mask in zip(params, masks, strict=True):
        unset = 0
        if len(param) == 128:
            unset = 64
        elif len(param) == 16:
            assert param[:12] in vectors, param.hex()
            unset = 4
        kept = len(param) - unset
        assert all(mask[:kept]), f"bytes that nobody sets: {param.hex()} {mask.hex()}"
        found.append(mask[:kept] + bytes(unset))
    return found


def expected_grids(c: Call, cut: Mapping[str, int]) -> list[tuple[str, list[int]]]:
    """A word of each kernel's name, and its grid: upstream's formulas, and our copy of the states before."""
    h, n = c.heads, c["num_seqs"]
    fixup = (
        ("FixupSimt", n * h * 32)
        if h <= 8
        else ("FixupSimt", n * h * 16)
        if h <= 16
        else ("FixupHmma", n * h * 2)
    )
    return [
        *([("GatherStates", [h, n, 8])] if c.axes["initial_state"] else []),
        ("TPrecompute", [h * cut["max_t_blocks"], n, 1]),
        ("MNPrecompute", [h * cut["max_chunks"], n, 1]),
        (fixup[0], [fixup[1], 1, 1]),
        ("Prefill", [h * cut["max_chunks"], n, 1]),
    ]


@functools.cache
def parameters(module: str, word: str) -> tuple[str, ...]:
    """Names of what upstream's kernel takes, in order."""
    (body,) = (
        node.body
        for node in ast.parse(upstream_text(module)).body
        if isinstance(node, ast.ClassDef) and node.name.startswith(f"CPDeltaRule{word}Sm")
    )
    (kernel,) = (node for node in body if isinstance(node, ast.FunctionDef) and node.name == "kernel")
    return tuple(a.arg for a in kernel.args.args[1:])


def expected_starts(word: str, module: str, c: Call, cut: Mapping[str, int]) -> list[tuple[str, bytes]]:
    """Each parameter's name in upstream's kernel and how it starts: a number, or the address of a tensor or a tensor map. No
    bytes where a parameter is about extents only. What the variant lacks is not passed."""
    base, h, axes = c["workspace"], c.heads, c.axes
    scratch = {name: base + cut[name] for name in ("t", "transfer", "added", "fixed", "gathered")}
    checkpoints = c["total_checkpoints"] if axes["checkpoints"] else 1
    numbers = {name: c[name] for name in ("num_q_heads", "num_k_heads", "num_v_heads", "num_seqs")}
    numbers |= {
        "num_sab_heads": h,
        "num_heads": h,
        "chunk_len": cut["chunk_len"],
        "total_checkpoints": checkpoints,
    }
    numbers |= {"total_t_blocks": cut["t_blocks"], "total_cp_chunks": cut["chunks"]}
    numbers |= {"checkpoint_every_n_tokens": c["checkpoint_every"]}
    at = {f"tma_atom_{name}": c[name] or base for name in ("q", "k", "v", "o")}
    at |= {"tma_atom_t": scratch["t"], "tma_atom_m": scratch["transfer"], "tma_atom_n": scratch["added"]}
    at |= {"g_t": scratch["t"], "g_transfer_t": scratch["transfer"], "g_local_state_t": scratch["added"]}
    at |= {"g_fixed_state": scratch["fixed"], "g_fixed_state_t": scratch["fixed"], "g_tensormaps": base}
    at |= {"g_state": c["final_state"], "g_state_t": scratch["added"]}
    at |= {"g_alpha": c["alpha"] or base, "g_beta": c["beta"] or base}
    at |= dict.fromkeys(("cu_seqlens", "g_cu_seqlens"), c["cu_seqlens"])
    if axes["initial_state"]:
        at |= dict.fromkeys(("g_initial_state", "g_initial_state_t"), scratch["gathered"])
    if axes["pooled"]:
        at["g_state_indices"] = c["output_state_indices"] or c["state_indices"]
    if axes["checkpoints"]:
        at |= {
            "g_state_checkpoints": c["checkpoints"] or base,
            "checkpoint_cu_starts": c["checkpoint_cu_starts"],
        }
    if word == "GatherStates":
        rows = [("g_rows", struct.pack("<Q", c["state_indices"]))] if axes["pooled"] else []
        first, last = (struct.pack("<Q", a) for a in (c["initial_state"], scratch["gathered"]))
        return [("g_states", first), *rows, ("g_packed", last)]
    known = {"scale": struct.pack("<f", c["scale"])}
    known |= {name: struct.pack("<i", value) for name, value in numbers.items()}
    known |= {name: struct.pack("<Q", value) for name, value in at.items()}
    names = parameters(module, word)
    extents = {name: b"" for name in names if name.startswith("tma_tensor_")}
    return [(name, (known | extents)[name]) for name in names if name in known or name in extents]


@pytest.mark.slow
@pytest.mark.parametrize(("sm", "capability", "device", "changes"), VARIANTS, ids=lambda v: str(v))
def test_our_launches_are_cutes_launches(
    built_variant: Callable[..., HostObject],
    gpu: FakeGpu,
    tmp_path: Path,
    sm: str,
    capability: tuple[int, int],
    device: str,
    changes: dict[str, str | bool],
) -> None:
    made = built_variant(sm, op_name=OP, **changes)
    reference = Reference(made, tmp_path / "reference")
    gpu.device(capability, sms=SMS)
    library = compiled_library([made], tmp_path / "ours")
    for index, (entry, _) in enumerate(made.answer.kernels):
        gpu.params(made.param_sizes(index), entry)

    reference.load()
    theirs = gpu.log("set_attribute")
    handle = library.prepare(OP, made.variant.axes)
    assert gpu.log("set_attribute") == theirs * 2, "kernel attributes differ"
    assert len(theirs) >= len(made.answer.kernels)

    rng, smem, seen = random.Random(f"{sm} {changes}"), dict(made.answer.kernels), set()
    for case in range(CASES):
        call = random_call(rng, made.variant.axes)
        cut = workspace_of(call, SMS, capability, device)
        size = library.ffi.new("uint64_t *")
        assert library.c.kseal_gdn_prefill_cp_workspace_size(handle, call.args(library), size) == 0, (
            library.error()
        )
        assert size[0] == cut["end"], f"case {case}: {call}"
        before = len(gpu.log("launch"))
        args = call.but(workspace_bytes=cut["end"]).args(library)
        assert library.c.kseal_gdn_prefill_cp_run(handle, args) == 0, library.error()
        ours = gpu.log("launch")[before:]
        arguments = cute_arguments(call, cut)
        expected = reference.launches(gpu, arguments)
        assert len(ours) == len(expected)
        for launch, (wanted, masks), (word, grid) in zip(
            ours, expected, expected_grids(call, cut), strict=True
        ):
            masks = set_bytes(params_of(wanted), masks, arguments)
            assert masked(launch, masks) == masked(wanted, masks), f"case {case}: {call}"
            assert word in launch["kernel"] and launch["grid"] == grid, f"case {case}: {call}"
            starts = expected_starts(word, f"delta_rule_cp_{made.variant.class_name}", call, cut)
            given = params_of(launch)
            assert len(given) == len(starts)
            for param, (name, start) in zip(given, starts, strict=True):
                assert param.startswith(start), f"case {case}: {word}, {name}: {call}"
            assert launch["smem"] == smem[launch["kernel"]]
            seen.add(launch["kernel"])
    assert seen == set(smem), "kernels that no case launches"
    assert library.c.kseal_gdn_prefill_cp_release(handle) == 0
    library.close()


# ---- refusals ----


@pytest.fixture(scope="module")
def libraries(fake_gpu: FakeGpu, tmp_path_factory: pytest.TempPathFactory) -> Kernseal:
    fake_gpu.reset()
    return library_of([PLAIN, POOLED, ZERO], "sm_90a", tmp_path_factory.mktemp("sm_90a"))


@pytest.fixture
def library(gpu: FakeGpu, libraries: Kernseal) -> Kernseal:
    return libraries


def call(axes: Mapping[str, Any] = PLAIN, **changes: Any) -> Call:
    """A valid call of moderate size with ``changes``."""
    made = random_call(random.Random(1), axes)
    sizes = {
        "num_q_heads": 4,
        "num_k_heads": 4,
        "num_v_heads": 8,
        "total_tokens": 1000,
        "num_seqs": 3,
        "max_seqlen": 0,
    }
    dense = {name: 0 for name in made.fields if name.endswith("_stride")}
    tokens = {name: 2**20 + 16 * i for i, name in enumerate(("q", "k", "v", "o", "alpha", "beta"))}
    return made.but(**sizes, **dense, **tokens, chunk_len=0, scale=0.5).but(**changes)


def refusal(library: Kernseal, made: Call) -> tuple[str, str]:
    """Name of the status, and the words."""
    handle = library.prepare(OP, made.axes)
    status = library.c.kseal_gdn_prefill_cp_run(handle, made.args(library))
    message = library.error()
    assert library.c.kseal_gdn_prefill_cp_release(handle) == 0
    return library.ffi.string(library.c.kseal_status_name(status)).decode(), message


SIZE_REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"num_q_heads": 0}, "invalid_argument", "num_q_heads is 0; it must be positive"),
    ({"num_k_heads": -1}, "invalid_argument", "num_k_heads is -1; it must be positive"),
    ({"num_v_heads": 0}, "invalid_argument", "num_v_heads is 0; it must be positive"),
    ({"head_dim": 64}, "invalid_argument", "head_dim is 64; it must be 128"),
    (
        {"num_v_heads": 6},
        "invalid_argument",
        "num_q_heads, num_k_heads, num_v_heads are 4, 4, 6; Hk = Hq with",
    ),
    (
        {"num_k_heads": 2},
        "invalid_argument",
        "num_q_heads, num_k_heads, num_v_heads are 4, 2, 8; Hk = Hq with",
    ),
    ({"total_tokens": -1}, "invalid_argument", "total_tokens is -1; it must not be negative"),
    ({"total_tokens": 2**21}, "overflow", "total_tokens is 2097152; T * H * D must be below 2^31 (H is 8"),
    ({"num_seqs": -1}, "invalid_argument", "num_seqs is -1; it must not be negative"),
    ({"num_seqs": 65536}, "overflow", "num_seqs is 65536; it must be at most 65535"),
    ({"num_seqs": 16384}, "overflow", "num_seqs is 16384; N * H * D * D must be below 2^31 (H is 8"),
    ({"max_seqlen": 333}, "invalid_argument", "max_seqlen is 333; it must be 334 to 1000"),
    ({"max_seqlen": 1001}, "invalid_argument", "max_seqlen is 1001; it must be 334 to 1000"),
    ({"max_seqlen": -1}, "invalid_argument", "max_seqlen is -1; it must be 334 to 1000"),
    ({"chunk_len": -64}, "invalid_argument", "chunk_len is -64; it must be a multiple of 64 up to 2^30"),
    ({"chunk_len": 100}, "invalid_argument", "chunk_len is 100; it must be a multiple of 64 up to 2^30"),
    ({"chunk_len": 2**30 + 64}, "invalid_argument", "chunk_len is 1073741888; it must be a multiple of 64"),
    (
        {"total_tokens": 2**20 + 64, "chunk_len": 64},
        "overflow",
        "chunk_len is 64, which makes up to 16387 chunks; chunks * H * D * D must be below 2^31 (H is 8",
    ),
]
"""Also refused when the size of the workspace is asked for."""

RUN_REFUSALS: list[tuple[Mapping[str, Any], dict[str, Any], str, str]] = [
    (PLAIN, {"scale": 0.0}, "invalid_argument", "scale is 0; it must be finite and not 0"),
    (PLAIN, {"scale": float("nan")}, "invalid_argument", "scale is nan; it must be finite"),
    (
        PLAIN,
        {"checkpoint_every": 64},
        "invalid_argument",
        "checkpoint_every is 64; it must be 0, since config.checkpoints",
    ),
    (
        POOLED,
        {"checkpoint_every": 65},
        "invalid_argument",
        "checkpoint_every is 65; it must be a positive multiple of 64",
    ),
    (PLAIN, {"total_checkpoints": 1}, "invalid_argument", "total_checkpoints is 1; it must be 0, since"),
    (
        POOLED,
        {"total_checkpoints": -1},
        "invalid_argument",
        "total_checkpoints is -1; it must not be negative",
    ),
    (
        POOLED,
        {"total_checkpoints": 2**14},
        "overflow",
        "total_checkpoints is 16384; total_checkpoints * H * D * D",
    ),
    (PLAIN, {"pool_rows": 1}, "invalid_argument", "pool_rows is 1; it must be 0, since config.pooled is 0"),
    (
        POOLED,
        {"pool_rows": 0},
        "invalid_argument",
        "pool_rows is 0; it must be positive, since config.pooled is 1",
    ),
    (POOLED, {"pool_rows": 2**31}, "overflow", "pool_rows is 2147483648; it must be below 2^31"),
    *(
        (
            PLAIN,
            {f"{name}_token_stride": stride},
            status,
            f"{name}_token_stride is {stride}; it must be {words}",
        )
        for name in ("q", "k", "v", "o")
        for stride, status, words in (
            (128, "invalid_argument", "at least"),
            (1100, "misaligned", "a multiple of 128"),
            (2**39, "overflow", "below 549755813888"),
        )
    ),
    (
        PLAIN,
        {"initial_state_stride": 131072},
        "invalid_argument",
        "initial_state_stride is 131072; it must be 0, since",
    ),
    (
        POOLED,
        {"final_state_stride": 1280},
        "invalid_argument",
        "final_state_stride is 1280; it must be at least 131072",
    ),
    (
        POOLED,
        {"initial_state_stride": 131073},
        "misaligned",
        "initial_state_stride is 131073; it must be a multiple",
    ),
    (
        POOLED,
        {"initial_state_stride": 2**59, "pool_rows": 4},
        "overflow",
        "initial_state_stride is 576460752303423488;",
    ),
    *(
        (PLAIN, {name: 0}, "invalid_argument", f"{name} is null; it is needed")
        for name in ("q", "k", "v", "o", "alpha", "beta")
    ),
    *(
        (PLAIN, {name: 0}, "invalid_argument", f"{name} is null; it is needed")
        for name in ("final_state", "cu_seqlens", "workspace")
    ),
    (
        PLAIN,
        {"initial_state": 0},
        "invalid_argument",
        "initial_state is null; it is needed, since config.initial_state is 1",
    ),
    (
        ZERO,
        {"initial_state": 64},
        "invalid_argument",
        "initial_state is 0x40; it must be null, since config.initial_state",
    ),
    (
        POOLED,
        {"state_indices": 0},
        "invalid_argument",
        "state_indices is null; it is needed, since config.pooled is 1",
    ),
    (
        PLAIN,
        {"state_indices": 64},
        "invalid_argument",
        "state_indices is 0x40; it must be null, since config.pooled is 0",
    ),
    (
        PLAIN,
        {"output_state_indices": 64},
        "invalid_argument",
        "output_state_indices is 0x40; it must be null",
    ),
    (
        POOLED,
        {"checkpoints": 0, "total_checkpoints": 1},
        "invalid_argument",
        "checkpoints is null; it is needed",
    ),
    (PLAIN, {"checkpoints": 64}, "invalid_argument", "checkpoints is 0x40; it must be null"),
    (POOLED, {"checkpoint_cu_starts": 0}, "invalid_argument", "checkpoint_cu_starts is null; it is needed"),
]


@pytest.mark.parametrize(("changes", "status", "words"), SIZE_REFUSALS, ids=lambda v: str(v)[:60])
def test_a_size_that_does_not_fit_is_refused_with_its_field(
    library: Kernseal, gpu: FakeGpu, changes: dict[str, Any], status: str, words: str
) -> None:
    made = call(**changes)
    found, message = refusal(library, made)
    assert found == status
    assert message.startswith(f"gdn_prefill_cp: {words}"), message
    handle, size = library.prepare(OP, made.axes), library.ffi.new("uint64_t *", 77)
    assert library.c.kseal_gdn_prefill_cp_workspace_size(handle, made.args(library), size) != 0
    assert (library.error(), size[0]) == (message, 77)
    library.c.kseal_gdn_prefill_cp_release(handle)
    assert gpu.log("launch") == []


@pytest.mark.parametrize(("axes", "changes", "status", "words"), RUN_REFUSALS, ids=lambda v: str(v)[:60])
def test_what_a_run_refuses_has_field_value_and_what_is_supported(
    library: Kernseal, gpu: FakeGpu, axes: Mapping[str, Any], changes: dict[str, Any], status: str, words: str
) -> None:
    found, message = refusal(library, call(axes, **changes))
    assert found == status, message
    assert message.startswith(f"gdn_prefill_cp: {words}"), message
    assert gpu.log("launch") == []


@pytest.mark.parametrize("name", ALIGN)
def test_a_pointer_off_its_alignment_is_refused(library: Kernseal, name: str) -> None:
    axes = PLAIN if name == "initial_state" else POOLED
    element = 4 if "indices" in name or "cu_" in name else ALIGN[name]
    found, message = refusal(library, call(axes, **{name: 2**20 + element // 2}))
    assert found == "misaligned"
    assert re.fullmatch(rf"gdn_prefill_cp: {name} is 0x\w+; it must be aligned to {element} bytes", message)


def test_the_workspace_must_be_as_large_as_was_said(library: Kernseal) -> None:
    made = call()
    needed = workspace_of(made, SMS, (9, 0), "NVIDIA H200")["end"]
    found, message = refusal(library, made.but(workspace_bytes=needed - 1))
    assert found == "workspace_too_small"
    assert message == f"gdn_prefill_cp: workspace_bytes is {needed - 1}; {needed} are needed"


def test_no_sequences_are_a_no_op_whatever_the_rest(library: Kernseal, gpu: FakeGpu) -> None:
    made = Call(PLAIN, {"num_seqs": 0})
    handle, size = library.prepare(OP, PLAIN), library.ffi.new("uint64_t *", 77)
    assert library.c.kseal_gdn_prefill_cp_run(handle, made.args(library)) == 0
    assert library.c.kseal_gdn_prefill_cp_workspace_size(handle, made.args(library), size) == 0
    assert size[0] == 0
    library.c.kseal_gdn_prefill_cp_release(handle)
    assert gpu.log("launch") == []


def test_another_device_than_the_prepared_one_is_refused(library: Kernseal, gpu: FakeGpu) -> None:
    gpu.device((9, 0), count=2, sms=SMS)
    handle = library.prepare(OP, PLAIN, device=0)
    gpu.current(1)
    status = library.c.kseal_gdn_prefill_cp_run(handle, call().args(library))
    assert library.ffi.string(library.c.kseal_status_name(status)).decode() == "not_prepared"
    gpu.current(0)
    library.c.kseal_gdn_prefill_cp_release(handle)
