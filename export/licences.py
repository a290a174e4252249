"""Upstream's licences, and kernseal's own, as a bundle carries them."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from kernseal.export import files, paths, source

OWN = ("LICENSE", "NOTICE")


def collect(given: Path | None) -> dict[str, bytes]:
    """Path in the bundle to text.

    Args:
        given: the source of the build; None for the pinned wheel.

    Raises:
        SourceInvalid: the source lacks a pinned licence, or has another text.
    """
    pin = source.upstream()
    found = {f"licenses/kernseal/{name}": _own(name) for name in OWN}
    for name, digest in pin.licences.items():
        found[f"licenses/{pin.name}/{name.rsplit('/', 1)[1]}"] = _upstream(pin, name, digest, given)
    return found


def _own(name: str) -> bytes:
    text = metadata.distribution("kernseal").read_text(f"licenses/{name}")
    return (text or (paths.kernels().parent / name).read_text()).encode()


def _upstream(pin: source.Upstream, name: str, digest: str, given: Path | None) -> bytes:
    kept = paths.cache() / "licences" / digest
    if kept.is_file():
        data = kept.read_bytes()
        if files.sha256_bytes(data) == digest:
            return data
    opened, _ = source.open_source(given, pin)
    data = source.read_set(opened, {name: digest})[name]
    files.write_atomic(kept, data)
    return data
