"""How commands print: a table for people, one JSON document for programs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from kernseal.export import machine, model, spec
from kernseal.export.model import Model
from kernseal.export.spec import Op, Target
from kernseal.loader.errors import InvalidArgument

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
sm_option = click.option(
    "--sm", required=True, help="SM: 90, 100, 103, 120, 121 (or sm_120a), a comma list, or all."
)
retarget_option = click.option(
    "--retarget", help="Compile the SM's source for this SM instead: a validation bundle."
)
host_option = click.option(
    "--host", default="linux-x86_64", show_default=True, help="linux-x86_64 or linux-aarch64."
)


profile_option = click.option(
    "--profile", help="Which variants: a profile of kernel.yaml.  [default: default]"
)
model_option = click.option(
    "--model",
    "config",
    type=click.Path(path_type=Path),
    help="Instead of a profile: what the model of this Hugging Face config.json, or of its folder, needs.",
)
set_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="AXIS=VALUE[,VALUE]",
    help="With --model: an axis that the config does not say or that is to differ from it, such as page_size=32,"
    " kv_dtype=bf16,e4m3 or group_size=8; may be repeated.",
)


def choosing(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say which variants; see ``choice``."""
    for option in (set_option, model_option, profile_option):
        command = option(command)
    return command


def choice(
    profile: str | None, config: Path | None, settings: Sequence[str], ops: Sequence[Op]
) -> tuple[str, Model | None]:
    """``--profile``, ``--model`` and ``--set`` to a profile or, instead of it, a model.

    Raises:
        InvalidArgument: options that do not go together, or ``--set`` with an axis or value that no op has.
        Malformed: the config is none.
    """
    if config is None:
        if settings:
            raise InvalidArgument(f"--set {settings[0]!r}: it goes with --model")
        return profile or "default", None
    if profile is not None:
        raise InvalidArgument(f"--profile {profile!r}: give it or --model, not both")
    return "default", Model(model.read_config(config), model.parse_chosen(settings, ops))


class Jobs(click.IntRange):
    """A number, or ``auto`` for the number that suits this machine."""

    name = "number or auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return machine.default_jobs() if value == "auto" else int(super().convert(value, param, ctx))


def building(command: Callable[..., None]) -> Callable[..., None]:
    """The options of every command that compiles: what, how many at once, from which source, how loudly."""
    options = (
        sm_option,
        retarget_option,
        click.option(
            "--variant",
            "only",
            multiple=True,
            help="Only this variant (id or op/id), of the profile or not; may be repeated.",
        ),
        click.option(
            "--jobs",
            type=Jobs(1, 256),
            default="auto",
            show_default=True,
            help="Variants compiled at once, each with up to 1.5 GB of memory; auto is what cores and memory allow.",
        ),
        click.option(
            "--source",
            type=click.Path(path_type=Path),
            help="FlashInfer wheel or checkout instead of the pinned wheel.",
        ),
        click.option(
            "--scheduler",
            metavar="ADDRESS",
            help="Compile on this dask.distributed cluster, such as tcp://farm:8786. Needs kernseal[farm].",
        ),
        click.option("--no-cache", is_flag=True, help="Compile every variant again, cached or not."),
        click.option("--quiet", is_flag=True, help="No progress."),
        as_json,
    )
    for option in reversed(options):
        command = option(command)
    return command


def show(data: Any, wanted: bool, people: Callable[[], None]) -> None:
    """Print ``data`` as JSON, or call ``people``."""
    if wanted:
        click.echo(json.dumps(data, indent=1))
    else:
        people()


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    right: Sequence[str] = (),
    shrink: Sequence[str] = (),
) -> None:
    """Print a table.

    Args:
        right: columns of numbers.
        shrink: columns that give way where the terminal is narrow, so that the others keep one line a row; without any,
            long cells fold.
    """
    made = Table(
        title=title, title_justify="left", title_style="bold", header_style="bold", box=box.SIMPLE_HEAD
    )
    for column in columns:
        made.add_column(
            column,
            justify="right" if column in right else "left",
            overflow="ellipsis" if column in shrink else "fold",
            no_wrap=bool(shrink) and column not in shrink,
        )
    for row in rows:
        made.add_row(*(str(cell) for cell in row))
    out = Console()
    (out if out.is_terminal else Console(width=180)).print(made, highlight=False)


def targets(sm: str, retarget: str | None = None, host: str = "linux-x86_64") -> list[Target]:
    """``--sm`` to targets.

    Raises:
        InvalidArgument, Unsupported: naming the value and what is supported.
    """
    ops = spec.load_ops()
    names = spec.all_targets(ops) if sm.strip() == "all" else [part for part in sm.split(",") if part.strip()]
    if not names:
        raise InvalidArgument(f"--sm {sm!r}: name an SM such as 120, a comma list, or all")
    return [spec.parse_target(name, retarget, ops, host) for name in names]


def size(number: int) -> str:
    """Bytes for people."""
    return f"{number:,}"


def short_entry(entry: str) -> str:
    """A kernel's name for people: the class, or else the function, that CuTe's entry begins with.

    CuTe writes ``kernel_cutlass_``, the function, for a method its module (without dots) and class, and then every type of
    the signature. Entries of other compilers are short as they are.
    """
    name = entry.removeprefix("kernel_cutlass_")
    if name == entry:
        return entry
    before_signature = re.split(r"_(?:tensor)?ptr", name)[0]
    if found := re.search(r"([A-Z][A-Za-z0-9]*)_object_at", before_signature):
        return found[1]
    return re.split(r"_(?=[A-Z]|\d+_)", before_signature)[0]


def folder(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
