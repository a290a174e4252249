"""Templates to text: one jinja2 environment with the few spellings that C, Rust and Markdown need."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import jinja2

from kernseal.abi.model import ABI_DIR, Abi, Field, Function, Struct

WIDTH = 112


def prototype(function: Function) -> str:
    params = ", ".join(p.type.declare(p.name) for p in function.params) or "void"
    text = f"{function.returns.declare(function.name)}({params})"
    return text if len(text) < WIDTH else text.replace(", ", ",\n    ")


def rust_fn(function: Function) -> str:
    params = ", ".join(p.type.rust for p in function.params)
    returns = "" if function.returns.rust == "()" else f" -> {function.returns.rust}"
    return f'unsafe extern "C" fn({params}){returns}'


def comment(text: str, indent: int) -> str:
    """A C comment, wrapped; each line of ``text`` starts a new one."""
    pad = " " * indent
    lines = [
        line
        for paragraph in text.splitlines()
        for line in textwrap.wrap(paragraph, WIDTH - indent - 3, break_on_hyphens=False)
    ]
    return f"{pad}/* " + f"\n{pad} * ".join(lines) + " */"


def rules(function: Function) -> list[tuple[str, str]]:
    """What a caller has to keep to and to expect."""
    errors = ", ".join(error.c_name for error in function.errors)
    return [
        ("Lifetimes", function.lifetimes),
        ("Threads", function.threads),
        ("Streams", function.streams),
        ("Errors", f"{errors}." if errors else "None."),
    ]


def field_doc(field: Field) -> str:
    unit = f" In {field.unit}." if field.unit else ""
    since = f" Since {field.since}." if field.since else ""
    return f"{field.doc}{unit}{since}"


def access(struct: Struct) -> str:
    if struct.access == "out":
        return "The caller sets struct_size, the call writes the rest."
    return "Read during the call only."


def rustdoc(text: str) -> str:
    """Brackets are links in rustdoc, so shapes are escaped."""
    return text.replace("[", "\\[").replace("]", "\\]")


def pascal(text: str) -> str:
    return "".join(part.title() for part in text.split("_"))


def template(name: str) -> jinja2.Template:
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ABI_DIR / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 (C, Rust and Markdown, never HTML)
    )
    env.globals |= {
        "prototype": prototype,
        "rust_fn": rust_fn,
        "comment": comment,
        "field_doc": field_doc,
        "access": access,
        "rules": rules,
    }
    env.filters |= {"rustdoc": rustdoc, "pascal": pascal, "cstring": json.dumps}
    return env.get_template(name)


def dump(abi: Abi) -> dict[str, Any]:
    """The interface as plain data: every number, offset and prototype."""
    return {
        "abi": {"major": abi.major, "minor": abi.minor, "version": abi.version},
        "enums": {e.name: {c.c_name: c.value for c in e.constants} for e in abi.all_enums},
        "structs": {
            s.name: {
                "size": s.size,
                "min_size": s.min_size,
                "fields": {
                    f.name: {"type": f.type.c.strip(), "offset": f.offset, "size": f.type.size}
                    for f in s.fields
                },
            }
            for s in abi.all_structs
        },
        "functions": {f.name: " ".join(prototype(f).split()) for f in abi.all_functions},
    }
