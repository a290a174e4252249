"""The transformers integration on a host: small models, random weights, and the references for kernels."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from cpu import reference_bundle  # noqa: E402
from cpu.fake_driver import xqa  # noqa: E402
from cpu.fake_driver.gpu import FakeGpu  # noqa: E402
from cpu.reference_bundle import ReferenceBundle  # noqa: E402
from transformers import DynamicCache, StaticCache  # noqa: E402

from kernseal.integrations import cached_attention, gated_delta, variants  # noqa: E402
from kernseal.integrations.cached_attention import CachedAttention  # noqa: E402
from kernseal.integrations.transformers import enable  # noqa: E402
from kernseal.integrations.variants import Variants  # noqa: E402
from kernseal.loader.errors import InvalidArgument, Unsupported  # noqa: E402
from kernseal.loader.layout import Layout  # noqa: E402
from kernseal.loader.library import declarations  # noqa: E402

GEOMETRY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "pad_token_id": 0,
    "eos_token_id": None,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3_5": {},
    "Qwen3_5Moe": EXPERTS,
    "Qwen3Next": {**EXPERTS, "decoder_sparse_step": 2},
}
LINEAR, FULL = 2, 2
"""Layers of each kind."""

TOKENS = 6
TIE = 1e-3
"""Between logits that differ by less, float32 decides nothing."""


@pytest.fixture(autouse=True)
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the host pass for device 0, and float32 for a type of the kernels, so that rounding hides nothing."""
    monkeypatch.setattr(variants, "ordinal", lambda device: 0)
    for module in (cached_attention, gated_delta):
        monkeypatch.setattr(module, "launching", reference_bundle.launching)
    monkeypatch.setitem(variants.DTYPES, torch.float32, "f32")


def make(name: str = "Qwen3_5", **changes: Any) -> Any:
    torch.manual_seed(0)
    prefix = f"{name}Text" if name.startswith("Qwen3_5") else name
    config = getattr(transformers, f"{prefix}Config")(**GEOMETRY, **MODELS[name], **changes)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return make()


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def prompt(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, GEOMETRY["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def generate(
    model: Any, ids: torch.Tensor, tokens: int = TOKENS, **how: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens, and the logits they were picked from."""
    found = model.generate(
        ids,
        max_new_tokens=tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **{"attention_mask": torch.ones_like(ids), **how},
    )
    return found.sequences, torch.stack(found.logits)


def assert_same(stock: tuple[torch.Tensor, torch.Tensor], ours: tuple[torch.Tensor, torch.Tensor]) -> None:
    """The same tokens, and logits, in each row up to the first pick between two that are as good."""
    best, second = stock[1].topk(2).values.unbind(-1)
    tie = best - second < TIE
    until = tie.cumsum(0) - tie.int() == 0
    assert until.float().mean() > 0.5, "the prompt decides too little; take another"
    torch.testing.assert_close(ours[1][until], stock[1][until], rtol=TIE, atol=TIE)
    assert (ours[1].argmax(-1) == stock[1].argmax(-1))[until & ~tie].all()


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("length", [1, 2, 64, 100])
def test_every_model_of_the_family_says_the_same(name: str, length: int) -> None:
    model, ids, bundle = make(name), prompt(2, length), ReferenceBundle()
    stock = generate(model, ids)
    with enable(bundle, model) as served:
        assert_same(stock, generate(model, ids))
    decodes = TOKENS if length == 1 else TOKENS - 1  # the first token of a prompt of one is a decode, too
    assert served.stats() == {
        "gdn_prefill": {"served": LINEAR, "left": {}},
        "xqa_decode": {"served": FULL * decodes, "left": {}},
    }


@pytest.mark.parametrize("page_size", [16, 32, 128])
@pytest.mark.parametrize("cache", [None, "static", "given"])
def test_every_cache_is_used_where_it_is(model: Any, page_size: int, cache: str | None) -> None:
    ids, bundle = prompt(3, 37), ReferenceBundle()
    how: dict[str, Any] = {"cache_implementation": cache} if cache == "static" else {}
    stock = generate(model, ids, **how)
    if cache == "given":  # longer than the text, and of no whole number of pages
        how = {"past_key_values": StaticCache(model.config, max_cache_len=77)}
    with enable(bundle, model, page_size=page_size):
        assert_same(stock, generate(model, ids, **how))
    args, values = bundle.calls("xqa_decode")[-1]
    assert type(args["k"]) is int and values["kv_page_stride"] == GEOMETRY["head_dim"]


def with_distances(x: torch.Tensor, layout: str) -> torch.Tensor:
    """[B, Hkv, T, D] with the same numbers at other distances."""
    wide = torch.nn.functional.pad(x, (0, 0, 0, 9))
    rows = {
        "dense": x,
        "cropped": wide[:, :, :-9],
        "token by token": x.transpose(1, 2).contiguous().transpose(1, 2),
    }
    return {**rows, "no whole rows": torch.nn.functional.pad(x, (0, 1))[..., :-1]}[layout]


LAYOUTS = ["dense", "cropped", "token by token", "no whole rows"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("other", LAYOUTS)
def test_k_and_v_at_any_distances(layout: str, other: str) -> None:
    torch.manual_seed(3)
    query = torch.randn(3, 8, 1, 32)
    key, value = torch.randn(2, 3, 2, 50, 32)
    mask = torch.ones(3, 1, 1, 50, dtype=torch.bool)
    mask[1, ..., :21], mask[2, ..., 44:] = False, False
    attend = CachedAttention(Variants(bundle := ReferenceBundle(), "make"), page_size=16)
    k, v = with_distances(key, layout), with_distances(value, other)
    assert torch.equal(k, key) and torch.equal(v, value)
    got = attend(query, k, v, mask, scaling=0.3, layer=0)
    want = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(got.transpose(1, 2), want, rtol=1e-5, atol=1e-5)
    ((args, _),) = bundle.calls("xqa_decode")
    in_place = layout == other != "no whole rows"
    assert (args["k"] == k.data_ptr() and args["v"] == v.data_ptr()) == in_place


@pytest.mark.parametrize("shared", [0, 1, 2])
def test_k_and_v_that_are_expanded(shared: int) -> None:
    """A stride of 0 would be taken for that of dense heads and tokens; between sequences the page table has it."""
    torch.manual_seed(4)
    query = torch.randn(3, 8, 1, 32)
    key, value = (torch.randn(3, 2, 50, 32).narrow(shared, 0, 1).expand(3, 2, 50, 32) for _ in range(2))
    attend = CachedAttention(Variants(bundle := ReferenceBundle(), "make"), page_size=16)
    got = attend(query, key, value, None, scaling=0.3, layer=0)
    want = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(got.transpose(1, 2), want, rtol=1e-5, atol=1e-5)
    ((args, values),) = bundle.calls("xqa_decode")
    assert (args["k"] == key.data_ptr()) == (shared == 0)
    assert 0 not in (values["kv_head_stride"], values["kv_token_stride"])


@pytest.mark.parametrize("cache", [None, "static"])
def test_the_library_takes_the_call(model: Any, gpu: FakeGpu, tmp_path: Path, cache: str | None) -> None:
    ids, bundle = prompt(3, 37), ReferenceBundle()
    ids[1, :9] = 0
    with enable(bundle, model):
        generate(model, ids, attention_mask=(ids != 0).long(), cache_implementation=cache)
    axes = xqa.axes_of(head_dim=GEOMETRY["head_dim"], group_size=4)
    library = xqa.library_of([axes], "sm_90a", tmp_path)
    handle = library.prepare(xqa.OP, axes)
    layout = Layout(declarations(), "kseal_xqa_decode_args")
    for _, values in bundle.calls("xqa_decode"):
        values["workspace"] &= -128  # as torch aligns memory of a device
        record = layout.pack([values[name] for name in layout.names])
        address = int(declarations().cast("uintptr_t", record))
        gpu.reset()
        gpu.params(xqa.param_sizes(axes))
        call = library.ffi.cast("kseal_xqa_decode_args *", address)
        assert library.c.kseal_xqa_decode_run(handle, call) == 0, library.error()
        assert len(gpu.log("launch")) == 1
    library.c.kseal_xqa_decode_release(handle)


def test_left_padding_is_skipped_row_by_row(model: Any) -> None:
    ids, mask = prompt(4, 50), torch.ones(4, 50, dtype=torch.long)
    for row, pads in enumerate([0, 1, 17, 49]):
        ids[row, :pads], mask[row, :pads] = 0, 0
    for how in ({}, {"cache_implementation": "static"}):
        bundle = ReferenceBundle()
        stock = generate(model, ids, attention_mask=mask, **how)
        with enable(bundle, model):
            assert_same(stock, generate(model, ids, attention_mask=mask, **how))
        args, _ = bundle.calls("xqa_decode")[0]
        assert args["seq_lens"].tolist() == [51, 50, 34, 2]


def test_a_prompt_in_two_parts_continues_from_the_state(model: Any) -> None:
    ids = prompt(2, 90)

    def logits() -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        model(ids[:, :70], past_key_values=cache)
        return model(ids[:, 70:], past_key_values=cache).logits

    stock, bundle = logits(), ReferenceBundle()
    with enable(bundle, model) as served:
        torch.testing.assert_close(logits(), stock, rtol=1e-3, atol=1e-3)
    assert served.stats()["gdn_prefill"]["served"] == 2 * LINEAR
    first, second = bundle.calls("gdn_prefill")[0][0], bundle.calls("gdn_prefill")[LINEAR][0]
    assert first["initial_state"] is first["final_state"]
    assert second["initial_state"] is not second["final_state"]


def test_packed_sequences_are_kept_apart(model: Any) -> None:
    ids, ends = prompt(1, 60), torch.tensor([0, 25, 60], dtype=torch.int32)
    alone = [
        model.model.layers[0].linear_attn(model.model.embed_tokens(part)) for part in ids.split([25, 35], 1)
    ]
    packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    with enable(ReferenceBundle(), model) as served:
        together = model.model.layers[0].linear_attn(model.model.embed_tokens(ids), **packed)
    assert served.stats()["gdn_prefill"]["served"] == 1
    # The convolution reads across the border, so the first rows of the second differ.
    torch.testing.assert_close(together[:, :25], alone[0], rtol=1e-3, atol=1e-3)


def test_repeated_heads_are_given_once(model: Any) -> None:
    bundle = ReferenceBundle()
    with enable(bundle, model):
        generate(model, prompt(2, 20), tokens=1)
    _, values = bundle.calls("gdn_prefill")[0]
    assert [values[f"num_{x}_heads"] for x in "qkv"] == [2, 2, 4]
    assert (values["total_tokens"], values["num_seqs"], values["head_dim"]) == (40, 2, 16)


def test_the_layers_of_a_pass_share_one_page_table(model: Any) -> None:
    bundle = ReferenceBundle()
    with enable(bundle, model):
        generate(model, prompt(2, 20), tokens=3)
    tables = [args["page_table"] for args, _ in bundle.calls("xqa_decode")]
    assert len(tables) == 2 * FULL
    assert tables[0] is tables[1] and tables[2] is tables[3] and tables[0] is not tables[2]


def test_a_mask_that_is_written_to_between_passes_is_read_again(model: Any) -> None:
    cache, mask = StaticCache(model.config, max_cache_len=40), torch.zeros(1, 1, 1, 40, dtype=torch.bool)
    with enable(bundle := ReferenceBundle(), model):
        model(prompt(1, 20), past_key_values=cache)
        for position in (20, 21):
            mask[..., : position + 1] = True
            model(
                prompt(1, 1),
                past_key_values=cache,
                attention_mask=mask,
                position_ids=torch.tensor([[position]]),
            )
    assert [args["seq_lens"].item() for args, _ in bundle.calls("xqa_decode")] == [21, 21, 22, 22]


def test_disabling_gives_the_stock_path_back(model: Any) -> None:
    ids, bundle = prompt(1, 30), ReferenceBundle()
    stock = generate(model, ids)
    served = enable(bundle, model)
    served.disable()
    served.disable()
    again = generate(model, ids)
    assert torch.equal(again[1], stock[1])
    assert bundle.calls("gdn_prefill") == bundle.calls("xqa_decode") == []
    with enable(bundle, model):
        generate(model, ids)
    assert bundle.calls("gdn_prefill") != []


def test_another_model_is_left_alone(model: Any) -> None:
    other, ids, bundle = make(), prompt(1, 30), ReferenceBundle()
    stock = generate(other, ids)
    with enable(bundle, model):
        assert torch.equal(generate(other, ids)[1], stock[1])
    assert bundle.calls("gdn_prefill") == bundle.calls("xqa_decode") == []


def test_of_a_multimodal_model_the_language_part_is_served() -> None:
    torch.manual_seed(0)
    eye = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
    config = transformers.Qwen3_5Config(text_config=GEOMETRY, vision_config=eye)
    model, ids, bundle = (
        transformers.Qwen3_5ForConditionalGeneration(config).eval(),
        prompt(2, 20),
        ReferenceBundle(),
    )
    stock = generate(model, ids)
    with enable(bundle, model):
        assert_same(stock, generate(model, ids))
        assert model.config.vision_config._attn_implementation == "sdpa"
    assert len(bundle.calls("xqa_decode")) == FULL * (TOKENS - 1)


def test_an_error_inside_the_block_disables_too(model: Any) -> None:
    with pytest.raises(ZeroDivisionError), enable(ReferenceBundle(), model):
        raise ZeroDivisionError
    assert model.config._attn_implementation == "sdpa"


def test_bfloat16_is_within_its_rounding() -> None:
    model, ids = make().to(torch.bfloat16), prompt(2, 70)
    stock = generate(model, ids, tokens=1)[1].float()
    with enable(ReferenceBundle(), model):
        ours = generate(model, ids, tokens=1)[1].float()
    assert (ours - stock).abs().max() < 0.05 * stock.abs().max()
    assert not torch.equal(ours, stock)


def test_a_compiled_forward_runs_the_same() -> None:
    model, ids, bundle = make(), prompt(2, 20), ReferenceBundle()
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    stock = generate(model, ids)
    with enable(bundle, model) as served:
        eager = model.forward
        model.forward = torch.compile(eager, backend=backend)
        try:
            assert_same(stock, generate(model, ids, cache_implementation="static"))
        finally:
            model.forward = eager
    assert graphs
    assert served.stats()["xqa_decode"] == {"served": FULL * (TOKENS - 1), "left": {}}


LACKS = {
    "gdn_prefill": {"state_layout": "hkv"},
    "xqa_decode": {"head_dim": 32, "group_size": 4, "page_size": 32},
}


@pytest.mark.parametrize("op", list(LACKS))
def test_a_missing_variant_is_named_with_the_command_that_builds_it(model: Any, op: str) -> None:
    command = "kernseal build --sm sm_90a --model config.json --set page_size=32"
    with pytest.raises(Unsupported, match=f"^{op}: no variant; to build it: {command}$"):
        enable(ReferenceBundle({op: LACKS[op]}), model, page_size=32)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("op", list(LACKS))
def test_a_missing_variant_may_be_left_to_transformers(model: Any, op: str) -> None:
    ids = prompt(1, 30)
    stock = generate(model, ids)
    with enable(ReferenceBundle({op: LACKS[op]}), model, page_size=32, missing="stock") as served:
        assert_same(stock, generate(model, ids))
    counts = served.stats()
    (other,) = set(LACKS) - {op}
    assert counts[other]["served"] and not counts[other]["left"]
    ((reason, times),) = counts[op]["left"].items()
    assert counts[op]["served"] == 0 and reason.startswith(f"{op}: no variant")
    assert times == {"gdn_prefill": LINEAR, "xqa_decode": FULL * (TOKENS - 1)}[op]


def test_a_mask_with_gaps_is_refused_or_left(model: Any) -> None:
    ids, mask = prompt(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[1, 15:] = 0  # padding on the right: the first new token comes after it
    with pytest.raises(Unsupported, match="attention_mask has gaps"), enable(ReferenceBundle(), model):
        generate(model, ids, attention_mask=mask)
    stock = generate(model, ids, attention_mask=mask)
    with enable(ReferenceBundle(), model, missing="stock") as served:
        assert_same(stock, generate(model, ids, attention_mask=mask))
    assert list(served.stats()["xqa_decode"]["left"].values()) == [FULL * (TOKENS - 1)]


def test_a_mask_of_numbers_is_refused(model: Any) -> None:
    mask = torch.zeros(1, 1, 1, 21)
    words = r"attention_mask is torch.float32 of shape \(1, 1, 1, 21\)"
    with enable(ReferenceBundle(), model), pytest.raises(Unsupported, match=words):
        cache = model(prompt(1, 20)).past_key_values
        model(prompt(1, 1), past_key_values=cache, attention_mask=mask)


def test_a_gradient_is_refused_or_left(model: Any) -> None:
    ids = prompt(1, 20)
    with torch.enable_grad():
        with (
            pytest.raises(Unsupported, match="gdn_prefill: query needs a gradient"),
            enable(ReferenceBundle(), model),
        ):
            model(ids)
        with enable(ReferenceBundle(), model, missing="stock") as served:
            model(ids).logits.sum().backward()
    model.zero_grad()
    assert list(served.stats()["gdn_prefill"]["left"].values()) == [LINEAR]


def test_what_cannot_be_enabled_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = ReferenceBundle()
    with pytest.raises(InvalidArgument, match="missing is 'ignore'; it must be 'raise' or 'stock'"):
        enable(bundle, model, missing="ignore")
    with pytest.raises(Unsupported, match="model is a Linear; supported are models with layers Qwen3Next"):
        enable(bundle, torch.nn.Linear(2, 2))
    with enable(bundle, model), pytest.raises(InvalidArgument, match="enabled already"):
        enable(bundle, model)
    with pytest.raises(Unsupported, match="attention implementation 'eager'; it must be 'sdpa'"):
        enable(bundle, make(attn_implementation="eager"))
    monkeypatch.undo()
    with pytest.raises(
        Unsupported, match=r"model is torch.float32; supported: torch.bfloat16, torch.float16"
    ):
        enable(bundle, model)
    with pytest.raises(InvalidArgument, match="device is cpu; it must be a CUDA device"):
        enable(bundle, make().to(torch.bfloat16))


SMALL = {
    **GEOMETRY,
    "num_hidden_layers": 8,
    "layer_types": None,
    "hidden_size": 512,
    "initializer_range": 0.02,
}


@pytest.mark.parametrize("wrong", [None, "gdn_prefill", "xqa_decode"])
def test_the_gpu_program_passes_a_right_kernel_and_fails_a_wrong_one(
    monkeypatch: pytest.MonkeyPatch, wrong: str | None
) -> None:
    from gpu import hybrid_model, transformers_tokens

    if wrong is not None:
        right = reference_bundle.RUNS[wrong]

        def run(config: Any, args: Any, values: Any) -> None:
            right(config, args, values)
            args["o"].mul_(1.1)

        monkeypatch.setitem(reference_bundle.RUNS, wrong, run)
    modeling = sys.modules[transformers.Qwen3_5ForCausalLM.__module__]
    rule = inspect.unwrap(modeling.torch_chunk_gated_delta_rule)

    @functools.wraps(rule)
    def rounding(query: Any, key: Any, value: Any, **call: Any) -> Any:
        """Rounds q and k where fla and the kernel do, between norm and rule."""
        q, k = (torch.nn.functional.normalize(x.float(), dim=-1).to(x.dtype) for x in (query, key))
        return rule(q, k, value, **{**call, "use_qk_l2norm_in_kernel": False})

    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", rounding)
    model = hybrid_model.build("qwen3_5", device="cpu", **SMALL)
    enabled = transformers_tokens.Enabled(ReferenceBundle(), model)
    report = transformers_tokens.report_of(model, enabled, lengths=(1, 5, 70), equal=9, tokens=4)
    assert bool(report["failures"]) == (wrong is not None), report["failures"]
    assert report["calls"]["gdn_prefill"]["left"] == 0


def test_the_bench_alternates_and_both_sides_go_on_with_their_text(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu import bench_transformers, hybrid_model

    model, bundle = hybrid_model.build("qwen3_next", device="cpu", **SMALL), ReferenceBundle()
    order: list[str] = []
    sides = {"stock": nullcontext, "kernseal": lambda: enable(bundle, model)}

    def wall_us(call: Any) -> float:
        order.append(model.config._attn_implementation)
        call()
        return 2.0

    monkeypatch.setattr(bench_transformers, "wall_us", wall_us)
    monkeypatch.setattr(bench_transformers, "PREFILLS", [(2, 5)])
    monkeypatch.setattr(bench_transformers, "DECODES", [(2, 5)])
    monkeypatch.setattr(bench_transformers, "STEPS", 1)
    monkeypatch.setattr(bench_transformers, "PART", 3)
    found = bench_transformers.measured(model, sides, quick=False)
    assert list(found) == ["prefill 2 x 5", "decode 2 x 5, dynamic cache", "decode 2 x 5, static cache"]
    assert order == (["sdpa"] * 2 + ["kernseal"] * 4 + ["sdpa"] * 2) * 3 * 3
    assert {name: side["tokens_per_s"] for name, side in found["prefill 2 x 5"].items()} == {
        "stock": 5e6,
        "kernseal": 5e6,
    }
    lengths = [args["seq_lens"].tolist() for args, _ in bundle.calls("xqa_decode")]
    steps = list(range(6, 6 + 14))
    assert lengths == [[n, n] for n in steps for _ in range(2)] * 2
