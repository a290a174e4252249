"""transformers models of real head geometry, made small elsewhere, served on the GPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from gpu import hybrid_model  # noqa: E402
from gpu.hybrid_model import build, prompts  # noqa: E402
from gpu.transformers_tokens import Enabled, generated, report_of  # noqa: E402
from transformers import StaticCache  # noqa: E402

from kernseal.integrations.transformers import enable  # noqa: E402
from kernseal.loader.errors import Unsupported  # noqa: E402

SMALL = {"vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 2048}


@pytest.fixture(params=list(hybrid_model.GEOMETRIES))
def model(request: pytest.FixtureRequest, gpu: Any) -> Any:
    return build(request.param, **SMALL)


def test_tokens_part_only_where_rounding_decides(bundle: Any, model: Any, measure: Any) -> None:
    pytest.importorskip(
        "fla", reason="fla-core is not installed; without it the stock paths share their linear attention"
    )
    report = report_of(model, Enabled(bundle, model), lengths=(1, 16, 17, 64, 65, 200), equal=100, tokens=32)
    measure(typical_stock_difference=report["typical_stock_difference"], calls=report["calls"])
    assert report["failures"] == []


@torch.no_grad()
def test_a_prompt_in_parts_is_the_prompt(bundle: Any, model: Any, measure: Any) -> None:
    ids = prompts(model, 3, 300)
    with enable(bundle, model) as served:
        whole = model(ids, logits_to_keep=1).logits
        cache = StaticCache(model.config, max_cache_len=333)
        for part in ids.split([130, 100, 69, 1], dim=1):
            logits = model(part, past_key_values=cache, logits_to_keep=1).logits
    difference = float((logits - whole).abs().max())
    measure(difference=difference)
    assert difference < 0.1 * float(whole.abs().max())
    assert served.stats()["gdn_prefill"]["served"] == 4 * 6
    assert served.stats()["xqa_decode"]["served"] == 2


def test_a_compiled_decode_says_the_same(bundle: Any, measure: Any) -> None:
    """With a static cache, generate compiles the forward pass of a token and captures what lies between our calls."""
    model = build("qwen3_5", **SMALL, num_hidden_layers=4)
    ids = prompts(model, 2, 40)
    with enable(bundle, model) as served:
        eager = generated(model, ids, 8, cache_implementation="static")
        compiled = generated(model, ids, 8, cache_implementation="static", disable_compile=False)
    difference = float((eager.logits[:2] - compiled.logits[:2]).abs().max())
    measure(difference=difference)
    assert torch.equal(eager.tokens[:, :1], compiled.tokens[:, :1])
    assert difference < 0.1 * float(eager.logits.abs().max())
    assert served.stats()["xqa_decode"] == {"served": 2 * 7, "left": {}}


def test_a_page_size_that_the_bundle_lacks_is_named(bundle: Any, model: Any) -> None:
    has = {
        int(v.axes["page_size"])
        for v in bundle.variants()
        if v.op == "xqa_decode" and v.axes["head_dim"] == "256"
    }
    lacks = sorted({16, 32, 64, 128} - has)
    if not lacks:
        pytest.skip("the bundle has every page size")
    with pytest.raises(
        Unsupported, match=f"kernseal build --sm sm_90a --model config.json --set page_size={lacks[0]}"
    ):
        enable(bundle, model, page_size=lacks[0])
