"""FlashInfer's own planning of QSA attention, unpatched: ``python qsa_upstream.py TREE RECIPE SMS < cases.json``.

Answers in JSON, a record for each case: what FlashInfer would compile and how large its tables are. Its functions run as
they are in the wheel; only what asks a GPU (compute capability, resident clusters, devices) is answered here instead. With
``ptx`` in a case its kernels are compiled as well, through its own adapters, and their PTX is part of the answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import json
import math
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGE = "flashinfer.attention.prims_ts"
DTYPES = {"bf16": "bfloat16", "f16": "float16", "e4m3": "float8_e4m3fn"}


# ---- in the test's process ----


def unpack(folder: Path) -> Path:
    """The Python files that planning imports, from the pinned wheel."""
    from kernseal.export import source

    opened, _ = source.open_source(None, source.upstream())
    names = [*opened.names(PACKAGE.replace(".", "/")), "flashinfer/cute_dsl/availability.py"]
    for name in names:
        data = opened.read(name)
        assert data is not None, name
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def ask(tree: Path, recipe: Path, sms: int, cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What FlashInfer says to each case, on a device with ``sms`` SMs."""
    command = [sys.executable, __file__, str(tree), str(recipe), str(sms)]
    environment = {**os.environ, "CUTE_DSL_ARCH": "sm_100a", "CUTE_DSL_DISABLE_FILE_CACHING": "1"}
    done = subprocess.run(
        command, input=json.dumps(cases), capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


# ---- in the process that is asked ----


def _as_is(*given: Any, **_: Any) -> Any:
    """A decorator that changes nothing, with arguments or without."""
    return given[0] if given and callable(given[0]) else lambda function: function


def isolate(tree: Path) -> None:
    """``flashinfer`` is the tree; the packages around PrimTS are empty, since they import all of FlashInfer."""
    for name in ("flashinfer", "flashinfer.attention", PACKAGE, "flashinfer.cute_dsl"):
        package = types.ModuleType(name)
        package.__path__ = [str(tree / name.replace(".", "/"))]
        sys.modules[name] = package
    stubs = {
        "flashinfer.api_logging": {"flashinfer_experimental_api": _as_is},
        "flashinfer.utils": {
            **dict.fromkeys(
                ("get_device_sm_count", "_check_workspace_buffer_alignment", "check_shape_dtype_device")
            ),
            "device_support_pdl": lambda _: True,
            "ceil_div": lambda a, b: -(-a // b),
            "round_up": lambda a, b: -(-a // b) * b,
        },
        "flashinfer.trace.templates.attention": {
            "attention_ts_decode_trace_dispatch": None,
            "prims_ts_decode_wrapper_trace_dispatch": None,
        },
    }
    for name, attributes in stubs.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        sys.modules[name] = module


class Planner:
    """FlashInfer's functions, on a device that is not there."""

    def __init__(self, recipe: str, sms: int) -> None:
        import torch

        self.torch = torch
        torch.cuda.get_device_capability = lambda *_, **__: (10, 0)
        torch.cuda.device = lambda *_, **__: contextlib.nullcontext()
        self.decode = importlib.import_module(f"{PACKAGE}.decode")
        self.metadata = importlib.import_module(f"{PACKAGE}.q_token_kv_block_sparse_metadata")
        self.fmha = importlib.import_module(f"{PACKAGE}.kernels.fmha_decode.fmha_decode_config")
        self.fmha.get_max_active_clusters_for_cluster_size = lambda size: sms // size
        self.decode._resolve_cuda_device = lambda _: (torch.device("cuda", 0), 0)
        self.resolve = self.decode._resolve_decode_launch_spec
        self.decode._resolve_decode_launch_spec = self._remember
        found = importlib.util.spec_from_file_location("recipe", recipe)
        assert found is not None and found.loader is not None
        self.recipe = importlib.util.module_from_spec(found)
        found.loader.exec_module(self.recipe)

    def _remember(self, *args: Any) -> Any:
        self.spec = self.resolve(*args)
        return self.spec

    def answer(self, case: Mapping[str, Any]) -> dict[str, Any]:
        layout = self._layout(case)
        compiled = self._compile_spec(case, layout)
        items = dict(compiled.config_items)
        axes = {
            **{name: case[name] for name in ("dtype", "out_dtype", "head_dim", "heads_per_kv")},
            **{name: case[name] for name in ("block_size", "page_size", "count_current")},
            "position_dtype": "i64",
            "grouped": case["group"] > 1,
            "tile_q": items["tile_size_q"],
            "splits": items["splits_kv"] if items["use_split_kv"] else 1,
            "persistent": items["use_persistent_scheduler"],
            "flat_kv_heads": case["num_kv_heads"] if items["use_flat_native_kv_tma"] else 0,
        }
        return {
            "axes": axes,
            "page_capacity": layout.q_token_kv_block_sparse_page_indices_shape[1],
            "membership_words": layout.q_token_kv_block_sparse_page_memberships_shape[1],
            "kv_capacity": layout.max_seq_len,
            "partial_rows": math.prod(self.spec.scratch_shapes[1]) if axes["splits"] > 1 else 0,
            "differs": self._differences(axes, items),
            "ptx": self._ptx(compiled) if case.get("ptx") else [],
        }

    def _layout(self, case: Mapping[str, Any]) -> Any:
        torch, group, routes = self.torch, case["group"], case["num_routes"]
        dtype = getattr(torch, DTYPES[case["dtype"]])
        return self.metadata._get_prims_ts_q_token_kv_block_sparse_workspace_layout(
            routes * group,
            case["block_topk"],
            -(-case["max_seq_len"] // case["page_size"]),
            case["page_size"],
            group,
            max_seq_len_kv=case["max_seq_len"],
            num_qo_heads=case["heads_per_kv"] * case["num_kv_heads"],
            num_kv_heads=case["num_kv_heads"],
            head_dim=case["head_dim"],
            q_dtype=dtype,
            kv_dtype=dtype,
            out_dtype=getattr(torch, DTYPES[case["out_dtype"]]),
            device="cuda:0",
            num_query_groups=routes,
            packed_query=True,
            sparse_block_size=case["block_size"],
            split_kv=case["split"],
            count_current_block_in_topk=case["count_current"],
        )

    def _compile_spec(self, case: Mapping[str, Any], layout: Any) -> Any:
        """As ``_prepare_prims_ts_batch_decode_plan`` has it, for a contiguous cache."""
        spec, heads = self.spec, case["num_kv_heads"]
        if layout.query_major_memberships:
            config = dataclasses.replace(spec.config, query_major_memberships=True)
            spec = dataclasses.replace(spec, config=config)
        flat = (
            spec.config.uses_staged_one_inst_tmem_p
            and (spec.config.use_bf16_qkv or spec.config.use_fp8_qkv)
            and spec.config.has_storage_subpages
            and (heads == 1 or case["group"] > 1)
            and case["num_pages"] * case["page_size"] * heads < 2**31
        )
        direct = self.decode._DirectQ1CompileSpec(
            position_dtype_key="int64",
            max_seq_len_kv=case["max_seq_len"],
            block_topk=case["block_topk"],
            kv_block_size=case["block_size"],
            page_capacity=layout.q_token_kv_block_sparse_page_indices_shape[1],
            count_current_block_in_topk=case["count_current"],
        )
        key = DTYPES[case["dtype"]]
        return self.decode._make_decode_compile_spec(
            spec,
            device_index=0,
            num_qo_heads=case["heads_per_kv"] * heads,
            num_kv_heads=heads,
            head_dim=case["head_dim"],
            page_size=math.gcd(case["block_size"], case["page_size"]),
            q_dtype_key=key,
            k_dtype_key=key,
            v_dtype_key=key,
            out_dtype_key=DTYPES[case["out_dtype"]],
            direct_q1_spec=direct if case["group"] == 1 else None,
            flat_native_kv_tma=flat,
        )

    def _differences(self, axes: Mapping[str, Any], items: Mapping[str, Any]) -> list[str]:
        """Fields in which the recipe's configuration is not FlashInfer's."""
        theirs, ours = self.fmha.FmhaDecodeConfig(**items), self.recipe.config(axes, (10, 0))
        names = [f.name for f in dataclasses.fields(theirs)]
        return [name for name in names if getattr(theirs, name) != getattr(ours, name)]

    def _ptx(self, compiled: Any) -> list[str]:
        """PTX of the main kernel and of the reducer, as FlashInfer's adapters compile them (without TVM's host code)."""
        import cutlass.cute as cute

        compile_as_is, stream = cute.compile, cute.runtime.make_fake_stream
        with tempfile.TemporaryDirectory() as folder:

            def flattened(function: Any, *args: Any, options: str) -> Any:
                return compile_as_is(*flat(function, args, Path(folder)), options=options)

            self.decode._COMPILE_OPTIONS = (
                f"--opt-level 3 --gpu-arch sm_100a --keep-ptx --keep-cubin --dump-dir {folder}"
            )
            self.decode.build_and_load_attention_kernel = lambda *given, **_: given[4]()
            cute.runtime.make_fake_stream = lambda **_: stream()
            cute.compile = flattened
            self.decode._get_compiled_decode(compiled)
            return [path.read_text() for path in sorted(Path(folder).glob("*.ptx"))]


def flat(function: Any, args: Sequence[Any], folder: Path) -> tuple[Any, ...]:
    """A function of tensors and numbers alone around one of tuples and constants, which only TVM's host code can take."""
    import cutlass

    parameters = inspect.signature(getattr(function, "__wrapped__", function)).parameters.values()
    takes: list[str] = []
    gives: list[str] = []
    passed: list[Any] = []
    constants: dict[str, Any] = {}

    def take(name: str, value: Any, annotation: str) -> str:
        takes.append(f"{name}: {annotation}")
        passed.append(value)
        return name

    def kind(value: Any) -> str:
        return f"cutlass.{type(value).__name__}" if isinstance(value, cutlass.Numeric) else "cute.Tensor"

    for parameter, value in zip(parameters, args, strict=True):
        name, annotation = parameter.name, str(parameter.annotation)
        if isinstance(value, tuple):
            parts = ("None" if v is None else take(f"{name}_{i}", v, kind(v)) for i, v in enumerate(value))
            gives.append("(" + "".join(f"{part}, " for part in parts) + ")")
        elif value is None or "Constexpr" in annotation:
            constants[name] = value
            gives.append(f"CONSTANTS[{name!r}]")
        else:
            gives.append(take(name, value, "driver.CUstream" if "CUstream" in annotation else kind(value)))
    name = f"flat_{getattr(function, '__name__', 'function')}"
    path = folder / f"{name}.py"
    path.write_text(
        "import cutlass\nimport cutlass.cute as cute\nfrom cuda.bindings import driver\nCONSTANTS = {}\n"
        f"FUNCTION = None\n\n\n@cute.jit\ndef {name}({', '.join(takes)}) -> None:\n    FUNCTION({', '.join(gives)})\n"
    )
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None
    module: Any = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    module.CONSTANTS, module.FUNCTION = constants, function
    return (getattr(module, name), *passed)


def main() -> None:
    import ctypes

    from kernseal.export import toolchain

    tree, recipe, sms = sys.argv[1:]
    ctypes.CDLL(str(toolchain.dsl_runtime_path()), mode=ctypes.RTLD_GLOBAL)
    toolchain.bind_dsl()
    isolate(Path(tree))
    planner = Planner(recipe, int(sms))
    answers = [planner.answer(case) for case in json.load(sys.stdin)]
    print("\n" + json.dumps(answers))


if __name__ == "__main__":
    main()
