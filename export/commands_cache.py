"""``kernseal cache``."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from kernseal.export import output, paths
from kernseal.loader.errors import InvalidArgument

if TYPE_CHECKING:
    from kernseal.export.cache import Entry

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str) -> int:
    """``4G`` to bytes.

    Raises:
        InvalidArgument: not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise InvalidArgument(f"--max-size {text!r}: a number of bytes, or with K, M, G or T such as 4G")
    return int(float(match[1]) * UNITS[match[2].upper()])


def _counted(some: Sequence[Entry]) -> dict[str, int]:
    return {"entries": len(some), "bytes": sum(entry.size for entry in some)}


@click.command()
@click.option("--prune", is_flag=True, help="Remove entries, those used longest ago first.")
@click.option("--max-size", metavar="SIZE", help="With --prune: what may stay, such as 4G.")
@click.option(
    "--older-than",
    type=click.FloatRange(0),
    metavar="DAYS",
    help="With --prune: remove what was not used for so long.",
)
@output.as_json
def cache(prune: bool, max_size: str | None, older_than: float | None, as_json: bool) -> None:
    """Show what the cache of variants, wheels and Zig holds, or keep it within bounds. All of it comes back when needed.

    \b
    Examples:
      kernseal cache
      kernseal cache --prune --max-size 4G --older-than 30
    """
    from kernseal.export import cache as caching

    if not prune and (max_size is not None or older_than is not None):
        raise InvalidArgument("--max-size and --older-than go with --prune")
    if prune and max_size is None and older_than is None:
        raise InvalidArgument("--prune: say what may stay, with --max-size 4G or --older-than 30 or both")
    found = caching.entries()
    seconds = None if older_than is None else older_than * 86400
    gone = caching.to_prune(found, parse_size(max_size) if max_size else None, seconds) if prune else []
    refused = caching.remove(gone)
    removed = [entry for entry in gone if entry not in refused]
    left = [entry for entry in found if entry not in removed]
    left_bytes, removed_bytes = (sum(entry.size for entry in some) for some in (left, removed))
    kinds = {kind: _counted([entry for entry in left if entry.kind == kind]) for kind in caching.KINDS}
    data = {
        "folder": str(paths.cache()),
        "variants": kinds[caching.VARIANTS]["entries"],
        "bytes": left_bytes,
        "kinds": kinds,
        "removed": len(removed),
        "removed_bytes": removed_bytes,
        "refused": [str(entry.folder) for entry in refused],
        "last_used_days_ago": round((time.time() - left[0].used) / 86400, 1) if left else None,
    }

    def people() -> None:
        click.echo(f"{data['folder']}: {output.size(left_bytes)} bytes")
        for kind, held in kinds.items():
            click.echo(f"  {kind}: {held['entries']}, {output.size(held['bytes'])} bytes")
        if left:
            click.echo(f"the one used longest ago: {data['last_used_days_ago']} days")
        if prune:
            click.echo(f"removed {data['removed']} of them, {output.size(removed_bytes)} bytes")
        for entry in refused:
            click.echo(f"not removed, it is another user's: {entry.folder}")

    output.show(data, as_json, people)
