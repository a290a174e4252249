"""What ``--model`` makes of published configs, of configs no op can serve, and of ``--set``.

``model_configs`` holds the attention fields of config.json files as their publishers wrote them; ``layer_types`` is cut to
one period.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from builds import ROOT, compile_cache, signing_key
from click.testing import CliRunner

from kernseal.export import build, paths, spec
from kernseal.export.build import Options
from kernseal.export.cli import main
from kernseal.export.model import Model, ModelConfig, parse_chosen, read_config
from kernseal.export.spec import Op, Target
from kernseal.loader.errors import InvalidArgument, Malformed, Unsupported
from kernseal.loader.policy import Policy
from kernseal.loader.verify import verify_report

CONFIGS = ROOT / "tests" / "cpu" / "model_configs"
OPS = spec.load_ops()
GDN_OP, PAGED_OP, XQA_OP = (
    next(op for op in OPS if op.name == name) for name in ("gdn_prefill", "paged_prefill", "xqa_decode")
)
SM120 = Target("sm_120a")
LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
GDN = [
    f"gdn_prefill/bf16_sf32_{layout}_i64_init_{home}_alpha_beta"
    for layout in ("hkv", "hvk")
    for home in ("packed", "pooled")
]


def xqa(head_dim: int, group_size: int, *windows: str) -> list[str]:
    return [f"xqa_decode/bf16_kvbf16_obf16_d{head_dim}_g{group_size}_p16{window}" for window in windows]


def paged(head_dim: int, dtype: str = "bf16") -> list[str]:
    return [f"paged_prefill/{dtype}_d{head_dim}_{mask}" for mask in ("causal", "full")]


BOTH = ("", "_window")
PUBLISHED = {
    "llama-3-8b": [*paged(128), *xqa(128, 4, "")],
    "qwen2.5-7b": [*paged(128), *xqa(128, 7, "")],
    "qwen3-30b-a3b": [*paged(128), *xqa(128, 8, "")],
    "qwen3-next-80b-a3b": [*GDN, *paged(256), *xqa(256, 8, "")],
    "qwen3.5-27b": [*GDN, *paged(256), *xqa(256, 6, "")],
    "gemma-3-1b": [*paged(256), *xqa(256, 4, *BOTH)],
    "gemma-3-12b": [*paged(256), *xqa(256, 2, *BOTH)],
    "gemma-3-27b": [*paged(128), *xqa(128, 2, *BOTH)],
    "gemma-4-26b-a4b": [*xqa(256, 2, "_window"), *xqa(512, 8, "")],
    "gpt-oss-20b": xqa(64, 8, *BOTH),
    "mistral-7b-v0.1": xqa(128, 4, "_window"),
    "mistral-7b-v0.3": [*paged(128), *xqa(128, 4, "")],
    "phi-4": [*paged(128), *xqa(128, 4, "")],
    "phi-4-mini": [*paged(128), *xqa(128, 3, "")],
    "deepseek-v3": [],
    "ouro-1.4b": [*paged(128), *xqa(128, 1, "")],
}
ROWS = {
    "llama-3-8b": "Llama 3 8B",
    "qwen2.5-7b": "Qwen2.5 7B",
    "qwen3-30b-a3b": "Qwen3 32B, 30B-A3B",
    "qwen3-next-80b-a3b": "Qwen3-Next 80B-A3B",
    "qwen3.5-27b": "Qwen3.5 27B",
    "gemma-3-1b": "Gemma 3 1B",
    "gemma-3-12b": "Gemma 3 4B, 12B",
    "gemma-3-27b": "Gemma 3 27B",
    "gpt-oss-20b": "gpt-oss 20B, 120B",
    "mistral-7b-v0.3": "Mistral 7B, Nemo 12B, Small 24B",
    "phi-4": "Phi-4",
    "phi-4-mini": "Phi-4 mini",
    "ouro-1.4b": "Ouro-1.4B",
}


def needs(config: ModelConfig, *settings: str, target: Target = SM120, ops: Sequence[Op] = OPS) -> list[str]:
    model = Model(config, parse_chosen(settings, OPS))
    return [variant.key for op in ops for variant in model.variants(op, target)]


def published(name: str) -> ModelConfig:
    return read_config(CONFIGS / f"{name}.json")


def llama(**changes: Any) -> ModelConfig:
    return ModelConfig({**LLAMA, **changes})


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(arguments))
    return result.exit_code, result.output


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_needs_exactly_these(name: str) -> None:
    assert needs(published(name)) == PUBLISHED[name]


def test_every_config_here_is_tested() -> None:
    assert {path.stem for path in CONFIGS.iterdir()} == set(PUBLISHED)


@pytest.mark.parametrize("name", ROWS)
def test_models_yaml_says_what_the_config_says(name: str) -> None:
    rows = {
        row["model"]: row for row in yaml.safe_load((paths.kernels() / "xqa_decode/models.yaml").read_text())
    }
    row = rows[ROWS[name]]
    windows = BOTH if "window" in row else ("",)
    wanted = xqa(row["head_dim"], row["group_size"], *windows)
    assert [key for key in needs(published(name)) if key.startswith("xqa_decode/")] == wanted


def test_what_the_default_profile_is_for_is_in_it() -> None:
    default = {variant.key for op in OPS for variant in op.variants(SM120, "default")}
    assert {key for name in ROWS for key in PUBLISHED[name]} <= default


@pytest.mark.parametrize("sm", ["sm_90a", "sm_100a", "sm_103a", "sm_121a"])
def test_every_sm_has_what_qwen_needs(sm: str) -> None:
    assert needs(published("qwen3.5-27b"), target=Target(sm)) == PUBLISHED["qwen3.5-27b"]


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 2}, BOTH),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 2, "num_hidden_layers": 2}, [""]),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 0, "num_hidden_layers": 2}, ["_window"]),
        ({"sliding_window": 4096, "max_window_layers": 0, "num_hidden_layers": 2}, [""]),
        ({"sliding_window": 4096, "use_sliding_window": False, "layer_types": ["sliding_attention"]}, [""]),
        ({"sliding_window": 4096, "_sliding_window_pattern": 6, "num_hidden_layers": 5}, ["_window"]),
        ({"sliding_window": 4096, "sliding_window_pattern": 1, "num_hidden_layers": 5}, [""]),
        ({"sliding_window": 4096, "max_position_embeddings": 4096}, [""]),
        ({"sliding_window": 4095, "max_position_embeddings": 4096}, ["_window"]),
        ({"sliding_window": 4096, "layer_types": ["hybrid_sliding", "conv", "hybrid"]}, BOTH),
        ({"layer_types": ["linear_attention", "moe", "mamba"]}, []),
    ],
)  # fmt: skip
def test_windows_follow_from_the_layers_that_have_them(
    changes: dict[str, Any], windows: Sequence[str]
) -> None:
    whole = paged(128) if "" in windows else []
    assert needs(llama(**changes)) == [*whole, *xqa(128, 4, *windows)]


def test_a_config_may_leave_out_what_its_class_has_by_default() -> None:
    gemma = ModelConfig({"model_type": "gemma3_text", "num_hidden_layers": 34})
    assert needs(gemma) == [*paged(256), *xqa(256, 2, *BOTH)]
    small = ModelConfig({"model_type": "gemma4_text", "num_key_value_heads": 1, "num_hidden_layers": 30})
    assert needs(small) == [*xqa(256, 8, "_window"), *xqa(512, 8, "")]
    whole = ModelConfig({"model_type": "gemma3_text", "sliding_window": None})
    assert needs(whole) == [*paged(256), *xqa(256, 2, "")]


def test_a_head_of_each_query_head_and_a_head_dim_that_is_not_said() -> None:
    config = ModelConfig({"hidden_size": 2560, "num_attention_heads": 32})
    assert needs(config) == xqa(80, 1, "")


@pytest.mark.parametrize(
    "said", [{"torch_dtype": "float16"}, {"dtype": "float16"}, {"dtype": "torch.float16"}]
)
def test_the_element_type_is_that_of_the_config_in_every_op(said: dict[str, str]) -> None:
    hybrid = {**published("qwen3-next-80b-a3b"), "torch_dtype": None, **said}
    assert {key.split("/")[1].split("_")[0] for key in needs(ModelConfig(hybrid))} == {"f16"}
    assert needs(llama(**said)) == [*paged(128, "f16"), "xqa_decode/f16_kvf16_of16_d128_g4_p16"]


def test_states_of_bfloat16_are_pooled() -> None:
    wanted = [f"gdn_prefill/bf16_sbf16_{layout}_i64_init_pooled_alpha_beta" for layout in ("hkv", "hvk")]
    for config, settings in (
        (ModelConfig({**published("qwen3.5-27b"), "mamba_ssm_dtype": "bfloat16"}), ()),
        (published("qwen3.5-27b"), ("state_dtype=bf16",)),
    ):
        assert needs(config, *settings, ops=[GDN_OP]) == wanted


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 71, "num_key_value_heads": 1},
         r"op xqa_decode: group_size is 71 \(num_attention_heads / num_key_value_heads\); supported: 1, 2, .*, 16; --set"),
        ({"head_dim": 576}, r"head_dim is 576 .*; supported: 16, 32, .*, 512;"),
        ({"head_dim": 120}, r"head_dim is 120 .*; supported: 16"),
        ({"num_key_value_heads": 5}, r"num_attention_heads is 32; it must be a multiple of the KV heads, 5"),
        ({"num_key_value_heads": None, "multi_query": True},
         r"multi_query is true; supported is num_key_value_heads, or --set group_size=N"),
        ({"num_attention_heads": None}, r"num_attention_heads is missing"),
        ({"head_dim": None, "hidden_size": 100}, r"hidden_size is 100; without head_dim it must be a multiple of .*, 32"),
        ({"v_head_dim": 64}, r"v_head_dim is 64; it must be that of K, 128"),
        ({"torch_dtype": "float32"}, r"dtype is f32 \(dtype or torch_dtype\); supported: bf16, f16;"),
        ({"torch_dtype": "int4"}, r'torch_dtype is "int4"; supported: bfloat16, float16, float32'),
        ({"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping is 50.0; it must be absent: .* does not cap"),
        ({"attention_chunk_size": 8192}, r"attention_chunk_size is 8192; it must be absent: .* not chunks"),
        ({"index_topk": 512}, r"index_topk is 512; it must be absent"),
        ({"block_configs": [{"attention": {"n_heads_in_group": 8, "no_op": False, "window": None}}] * 9},
         r'block_configs is \[\{"attention": .*"w\.\.\.; it must be absent: only layer_types may tell layers apart'),
        ({"layer_types": ["full_attention", "chunked_attention"]}, r"layer_types has 'chunked_attention'; supported: full"),
    ],
)  # fmt: skip
def test_attention_that_no_variant_computes_is_refused_by_field_and_value(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(Unsupported, match=words):
        needs(llama(**changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"linear_key_head_dim": 96}, r"op gdn_prefill: .*linear_key_head_dim is 96; it must be 128"),
        ({"linear_value_head_dim": 256}, r"linear_value_head_dim is 256; it must be 128"),
        ({"linear_value_head_dim": None}, r"linear_value_head_dim is missing"),
        ({"linear_num_value_heads": 24}, r"linear_num_value_heads is 24; it must be a multiple of .*, 16"),
    ],
)
def test_gdn_layers_that_no_variant_computes_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        needs(ModelConfig({**published("qwen3-next-80b-a3b"), **changes}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": "32"}, r'num_attention_heads is "32"; it must be an integer, at least 1'),
        ({"num_key_value_heads": True}, r"num_key_value_heads is true; it must be an integer"),
        ({"head_dim": 0}, r"head_dim is 0; it must be"),
        ({"layer_types": "full_attention"}, r'layer_types is "full_attention"; it must be a list of strings'),
        ({"use_sliding_window": "no"}, r'use_sliding_window is "no"; it must be true or false'),
    ],
)
def test_a_field_of_another_type_is_malformed(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Malformed, match=rf"config\.json: {words}"):
        needs(llama(**changes))


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (["page_size=16,32"], ["bf16_kvbf16_obf16_d128_g4_p16", "bf16_kvbf16_obf16_d128_g4_p32"]),
        (["page_size=32", "page_size=64"], ["bf16_kvbf16_obf16_d128_g4_p32", "bf16_kvbf16_obf16_d128_g4_p64"]),
        (["kv_dtype=e4m3"], ["bf16_kve4m3_obf16_d128_g4_p16"]),
        (["kv_dtype=e4m3", "out_dtype=e4m3"], ["bf16_kve4m3_oe4m3_d128_g4_p16"]),
        (["kv_dtype=bf16,e4m3", "out_dtype=bf16,e4m3"],
         ["bf16_kvbf16_obf16_d128_g4_p16", "bf16_kve4m3_obf16_d128_g4_p16", "bf16_kve4m3_oe4m3_d128_g4_p16"]),
        (["dtype=f16,bf16"], ["bf16_kvbf16_obf16_d128_g4_p16", "f16_kvf16_of16_d128_g4_p16"]),
        (["group_size=8"], ["bf16_kvbf16_obf16_d128_g8_p16"]),
        (["sliding_window=false,true"], ["bf16_kvbf16_obf16_d128_g4_p16", "bf16_kvbf16_obf16_d128_g4_p16_window"]),
        (["state_dtype=bf16"], ["bf16_kvbf16_obf16_d128_g4_p16"]),
    ],
)  # fmt: skip
def test_what_is_set_comes_before_the_config_and_the_defaults(settings: list[str], wanted: list[str]) -> None:
    assert needs(published("llama-3-8b"), *settings, ops=[XQA_OP]) == [
        f"xqa_decode/{name}" for name in wanted
    ]


def test_an_axis_that_is_set_is_not_looked_for_in_the_config() -> None:
    found = needs(ModelConfig({"n_head": 71}), "group_size=1", "head_dim=64")
    assert found == [*paged(64), *xqa(64, 1, "")]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (["causal=false"], ["bf16_d128_full"]),
        (["dtype=f16", "causal=true,false"], ["f16_d128_causal", "f16_d128_full"]),
        (["head_dim=64", "causal=true"], ["bf16_d64_causal"]),
        (["head_dim=512"], []),
        (["group_size=8", "page_size=32"], ["bf16_d128_causal", "bf16_d128_full"]),
        (["kv_dtype=e4m3"], []),
        (["kv_dtype=bf16,e4m3"], ["bf16_d128_causal", "bf16_d128_full"]),
        (["kv_dtype=bf16", "dtype=bf16,f16", "causal=true"], ["bf16_d128_causal"]),
        (["kv_dtype=f16", "dtype=f16", "causal=true"], ["f16_d128_causal"]),
    ],
)
def test_prefill_over_pages_is_for_layers_over_everything(settings: list[str], wanted: list[str]) -> None:
    found = needs(published("llama-3-8b"), *settings, ops=[PAGED_OP])
    assert found == [f"paged_prefill/{name}" for name in wanted]


def test_without_a_cache_of_its_type_prefill_over_pages_gets_nothing() -> None:
    chosen = parse_chosen(["kv_dtype=e4m3"], OPS)
    (said,) = Model(published("llama-3-8b"), chosen).left_out([PAGED_OP, XQA_OP], SM120)
    assert said.startswith("paged_prefill: no variant: ") and said.endswith("with a cache of q's type")
    untyped = ModelConfig({**LLAMA, "torch_dtype": None})
    assert needs(untyped, "kv_dtype=bf16", ops=[PAGED_OP]) == paged(128)
    assert needs(untyped, "kv_dtype=f16", ops=[PAGED_OP]) == []


def test_prefill_over_pages_has_no_sinks_and_any_group() -> None:
    assert needs(published("gpt-oss-20b"), ops=[PAGED_OP]) == []
    assert needs(llama(num_attention_heads=71, num_key_value_heads=1), ops=[PAGED_OP]) == paged(128)


@pytest.mark.parametrize(
    ("name", "setting", "words"),
    [
        (
            "llama-3-8b",
            "kv_dtype=f16",
            "op xqa_decode, class mha_sm12x: a 16-bit cache has the element type of q",
        ),
        ("qwen3.5-27b", "initial_state=false", "op gdn_prefill, class sm120: a pool is read by its rows"),
        ("qwen3.5-27b", "checkpoints=true", "op gdn_prefill, class sm120: checkpoints are stored HVK"),
    ],
)
def test_layers_that_are_left_without_any_variant_are_an_error(name: str, setting: str, words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        needs(published(name), setting)


def test_a_value_that_only_another_op_has_is_refused_where_it_is_needed() -> None:
    axes = {**XQA_OP.data["axes"], "dtype": {**XQA_OP.data["axes"]["dtype"], "values": ["bf16"]}}
    narrow = Op(XQA_OP.name, XQA_OP.folder, {**XQA_OP.data, "axes": axes})
    assert needs(published("deepseek-v3"), "dtype=f16", ops=[narrow]) == []
    with pytest.raises(Unsupported, match=r"op xqa_decode: dtype is f16 .*; supported: bf16;"):
        needs(published("llama-3-8b"), "dtype=f16", ops=[narrow])


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "page_sise=32",
            r"'page_sise=32': supported is AXIS=VALUE with one of .*dtype, .*, page_size, .*sliding_window",
        ),
        ("page_size=17", r"'page_size=17': page_size is '17'; supported: .*16, 32, 64, 128 \(xqa_decode\)"),
        ("page_size=16,", r"page_size is ''; supported: .*16"),
        ("page_size", r"page_size is ''; supported: .*16"),
        ("sliding_window=1", r"sliding_window is '1'; supported: false, true"),
        ("dtype=f64", r"dtype is 'f64'; supported: .*bf16, f16 \(gdn_prefill\); .*bf16, f16 \(xqa_decode\)"),
    ],
)
def test_an_axis_or_value_that_nothing_has_lists_what_there_is(setting: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        parse_chosen([setting], OPS)


def test_an_op_that_gets_nothing_says_why() -> None:
    folder = XQA_OP.folder
    silent = Op("silent", folder, {key: value for key, value in XQA_OP.data.items() if key != "model"})
    quiet = Op("quiet", folder, silent.data)
    elsewhere = Op("elsewhere", folder, {**XQA_OP.data, "classes": {}})
    said = Model(published("deepseek-v3")).left_out([GDN_OP, XQA_OP, silent, elsewhere, quiet], SM120)
    assert said == [
        "gdn_prefill: no variant: the model has no layers of gated delta rule (linear_attention with"
        " linear_num_value_heads)",
        "xqa_decode: no variant: the model has no layers of attention over K and V heads (latent attention, MLA, has"
        " none)",
        "silent, quiet: no variant: a config does not say which; build a profile, or name them with --variant",
        "elsewhere: no variant: no class serves sm_120a",
    ]


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        (None, InvalidArgument, "not there; give a config.json or its folder"),
        ("[]", Malformed, r"config\.json: \[\]; it must be an object"),
        ("{", Malformed, r"config\.json: Expecting"),
        ("\xff", Malformed, r"config\.json: "),
        ("[" * 100_000, Malformed, r"config\.json: "),
    ],
)
def test_a_file_that_is_no_config_is_refused(
    tmp_path: Path, text: str | None, error: type[Exception], words: str
) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(error, match=words):
        read_config(path)


def test_a_config_is_found_in_its_folder_through_a_link_and_with_numbers_that_json_lacks(
    tmp_path: Path,
) -> None:
    (tmp_path / "blob").write_text(json.dumps({**LLAMA, "time_step_limit": [0.0, float("inf")]}))
    (tmp_path / "config.json").symlink_to("blob")
    assert needs(read_config(tmp_path)) == [*paged(128), *xqa(128, 4, "")]


def test_list_shows_what_the_model_needs() -> None:
    command = ("list", "--sm", "120,90", "--model", str(CONFIGS / "gpt-oss-20b.json"))
    code, text = invoke(*command, "--json")
    assert code == 0, text
    assert [(row["sm"], f"{row['op']}/{row['variant']}") for row in json.loads(text)] == [
        (sm, key) for sm in ("sm_120a", "sm_90a") for key in PUBLISHED["gpt-oss-20b"]
    ]
    code, text = invoke(*command)
    assert code == 0
    assert text.count("gdn_prefill: no variant: the model has no layers of gated delta rule") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["build", "--sm", "120", "--quiet", "--model", "{configs}/deepseek-v3.json"], 2, "gdn_prefill: no variant: "),
        (["build", "--sm", "120", "--model", "{configs}/llama-3-8b.json", "--profile", "full"], 2, "not both"),
        (["list", "--sm", "120", "--set", "page_size=32"], 2, "--set 'page_size=32': it goes with --model"),
        (["list", "--sm", "120", "--model", "{configs}/llama-3-8b.json", "--set", "page_size=8"], 2, "128 (xqa_decode)"),
        (["list", "--sm", "120", "--model", "/no/such"], 2, "--model '/no/such': not there"),
        (["list", "--sm", "120", "--model", "{configs}/../../../Makefile"], 4, "Makefile: Expecting value"),
    ],
)  # fmt: skip
def test_a_bad_argument_is_one_typed_error(arguments: list[str], code: int, words: str) -> None:
    result = CliRunner().invoke(main, [part.format(configs=CONFIGS) for part in arguments])
    assert result.exit_code == code, result.output
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["MODEL=m/config.json", "SET=page_size=32 kv_dtype=bf16,e4m3"],
         '--sm "120" --model "m/config.json" --set "page_size=32" --set "kv_dtype=bf16,e4m3"'),
        (["PROFILE=full"], '--sm "120" --profile "full"'),
        ([], '--sm "120"'),
    ],
)  # fmt: skip
def test_make_artifacts_passes_the_model_on(given: list[str], wanted: str) -> None:
    shown = subprocess.run(
        ["make", "-n", "--no-print-directory", "artifacts", "SM=120", *given],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.rstrip().endswith(f".venv/bin/kernseal build {wanted}")


def manifest(result: build.Result) -> Mapping[str, Any]:
    external = result.statement["predicate"]["buildDefinition"]["externalParameters"]
    assert isinstance(external, dict)
    return external


@pytest.mark.slow
def test_a_bundle_of_one_model_is_vouched_for_by_its_signature_alone(tmp_path: Path) -> None:
    options = Options(out=tmp_path / "dist", model=Model(published("llama-3-8b")))
    with compile_cache():
        first = build.build(OPS, SM120, options, signing_key())
        other = Model(llama(dtype="bfloat16"))
        second = build.build(OPS, SM120, Options(out=tmp_path / "dist", model=other), signing_key())
    assert (manifest(first)["profile"], manifest(first)["variants"]) == ("model", PUBLISHED["llama-3-8b"])
    assert (first.fresh, second.fresh) == (True, False), (
        "another config that needs the same makes the same bundle"
    )
    assert first.trusted_by == ("key:signer",)
    report = verify_report(first.path, policy=Policy.from_options(paths.manifests()), sm="sm_120a")
    assert not report["accepted"]
    statuses = {(found["status"], found["path"]) for found in report["violations"]}
    assert ("missing", "cubin/xqa_decode/bf16_kvbf16_obf16_d128_g8_p16.cubin") in statuses
