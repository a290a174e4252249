"""How QSA metadata is compiled: one instance of upstream's map kernel, named by a patch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernseal.export.job import NvrtcKernel, NvrtcProgram

POSITION = {"i32": "int", "i64": "long long"}


def union(axes: Mapping[str, Any], cls: Mapping[str, Any]) -> NvrtcProgram:
    """The union of what a group's query tokens select. How much shared memory a launch takes depends on its sizes."""
    return NvrtcProgram(
        macros={
            "KSEAL_GROUP": axes["group"],
            "KSEAL_POSITION": POSITION[axes["position_dtype"]],
            "KSEAL_QUERY_MAJOR": int(axes["query_major"]),
        },
        options=("--std=c++17", "--device-as-default-execution-space"),
        kernels=(NvrtcKernel(cls["name"], dynamic_smem=cls["max_smem"]),),
    )
