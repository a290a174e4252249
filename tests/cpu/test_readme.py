"""What the README shows is true: its code is part of examples that are run, its links lead somewhere."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import pytest
import yaml
from builds import ROOT

README = (ROOT / "README.md").read_text()
KERNEL = yaml.safe_load((ROOT / "kernels" / "gdn_prefill" / "kernel.yaml").read_text())
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


EXAMPLES = {
    "python": "abi/examples/python/gdn_prefill.py",
    "cpp": "abi/examples/cpp/xqa_decode.cpp",
    "rust": "abi/rust/examples/xqa_decode.rs",
    "c": "abi/examples/c/gdn_prefill.c",
}
MARKED = re.compile(
    r"^[ \t]*(?://|#|/\*) README: begin(?: \*/)?\n(.*?)^[ \t]*(?://|#|/\*) README: end",
    re.DOTALL | re.MULTILINE,
)


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    return str(found)


@pytest.mark.parametrize("language", EXAMPLES)
def test_a_block_is_what_its_example_marks(language: str) -> None:
    """The examples themselves are built and run: test_abi_examples.py, tests/gpu/run_examples.sh."""
    marked = MARKED.findall((ROOT / EXAMPLES[language]).read_text())
    assert marked
    assert block(language) == "\n".join(textwrap.dedent(part).strip("\n") + "\n" for part in marked)


def test_the_python_call_names_real_axes_and_fields() -> None:
    """Its example needs a GPU to run."""
    calls = {
        ast.unparse(node.func): {keyword.arg for keyword in node.keywords}
        for node in ast.walk(ast.parse(block("python")))
        if isinstance(node, ast.Call)
    }
    assert calls["bundle.prepare"] <= {field["name"] for field in KERNEL["abi"]["config"]}
    assert calls["gdn"] <= {field["name"] for field in KERNEL["abi"]["args"]}
    pointers = {field["name"] for field in KERNEL["abi"]["args"] if field["type"].startswith("ptr")}
    pooled_or_checkpointed = {
        *("state_indices", "output_state_indices", "checkpoints", "checkpoint_cu_starts"),
    }
    assert calls["gdn"] == pointers - pooled_or_checkpointed | {"scale"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_commands_of_the_readme_are_the_makefiles() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^    make ([a-z-]+)", README, re.MULTILINE)) == {"artifacts", "test"} <= targets
    assert set(re.findall(r"`make ([a-z-]+)`", README)) == {"example-cpp", "example-rust"} <= targets
