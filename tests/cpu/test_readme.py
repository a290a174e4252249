"""What the README shows is true: its C compiles, its Python names real fields, its links lead somewhere."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from builds import ROOT

from kernseal.export import toolchain

README = (ROOT / "README.md").read_text()
KERNEL = yaml.safe_load((ROOT / "kernels" / "gdn_prefill" / "kernel.yaml").read_text())
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    return str(found)


def test_the_c_call_compiles_without_a_warning(tmp_path: Path) -> None:
    source = tmp_path / "readme.c"
    source.write_text(
        "#include <stdio.h>\n#include <kernseal.h>\nvoid call(kseal_gdn_prefill_args args);\n"
        f"void call(kseal_gdn_prefill_args args) {{\n{block('c')}}}\n"
    )
    command = [
        *toolchain.zig_argv(),
        "cc",
        "-std=c11",
        "-Wall",
        "-Wextra",
        "-Wpedantic",
        "-Werror",
        "-c",
        "-o",
        str(tmp_path / "o"),
    ]
    done = subprocess.run(
        [*command, f"-I{ROOT}/abi/generated", str(source)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_python_call_names_real_axes_and_fields() -> None:
    calls = {
        node.func.attr: {keyword.arg for keyword in node.keywords}
        for node in ast.walk(ast.parse(block("python")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert calls["prepare"] <= {field["name"] for field in KERNEL["abi"]["config"]}
    assert calls["run"] <= {field["name"] for field in KERNEL["abi"]["args"]}
    required = {
        "q",
        "k",
        "v",
        "o",
        "alpha",
        "beta",
        "initial_state",
        "final_state",
        "cu_seqlens",
        "workspace",
        "stream",
    }
    assert required <= calls["run"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_commands_of_the_readme_are_the_makefiles() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^    make ([a-z-]+)", README, re.MULTILINE)) == {"artifacts", "test"} <= targets
