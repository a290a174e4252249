"""``kernseal report``: a page that claims no more than the verification found, that everybody can read, and that is safe
to open whatever the bundle and the benchmark say.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import synthetic_bundle as synthetic
from builds import ROOT, bundle, signing_key
from click.testing import CliRunner
from synthetic_bundle import NOW, RELEASE, STRANGER, Made

from kernseal.abi import model
from kernseal.export import bench, charts, commands_build, compressed, report, report_bundle, report_changes
from kernseal.export.cli import main
from kernseal.export.report_bundle import Reported
from kernseal.loader import canonical
from kernseal.loader.errors import InvalidArgument, Malformed, Mismatch, Unsupported
from kernseal.loader.pins import parse_pins
from kernseal.loader.policy import Policy
from kernseal.loader.statement import EVIDENCE

VOID = {"meta", "wbr", "br", "link", "img", "input", "hr"}
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&"
OP = "gdn_prefill"
MATRIX = "Evidence by variant and target"


@dataclass
class Node:
    """An element of a page."""

    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    inside: list[Node | str] = field(default_factory=list)

    def all(self, tag: str, **wanted: str) -> list[Node]:
        """The elements below with this tag, and with these attributes."""
        found: list[Node] = []
        for node in self.walk():
            if tag in ("*", node.tag) and all(node.attributes.get(k) == v for k, v in wanted.items()):
                found.append(node)
        return found

    def walk(self) -> Iterator[Node]:
        for child in self.inside:
            if isinstance(child, Node):
                yield child
                yield from child.walk()

    @property
    def raw(self) -> str:
        return "".join(child if isinstance(child, str) else child.raw for child in self.inside)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", self.raw).strip()

    @property
    def classes(self) -> list[str]:
        return self.attributes.get("class", "").split()


class Page(HTMLParser):
    """Reads a page and insists that every element is closed where it should be."""

    def __init__(self, html: bytes) -> None:
        super().__init__()
        self.root = Node("")
        self.open = [self.root]
        self.feed(html.decode())
        self.close()
        assert [node.tag for node in self.open] == [""]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), (tag, attrs)
        node = Node(tag, {name: value or "" for name, value in attrs})
        self.open[-1].inside.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].inside.append(Node(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].inside.append(data)


def only_keys() -> Policy:
    return Policy(keys=synthetic.key_set())


def locks_of(made: Made) -> report_changes.Locks:
    data = canonical.dumps(made.pins)
    return {("sm_90a", "linux-x86_64"): ("sm_90a.lock.json", json.loads(data))}


def read(made: Made, policy: Policy | None = None, locks: report_changes.Locks | None = None) -> Reported:
    return report_bundle.read(made.path, policy or only_keys(), locks or {}, now=NOW)


def shown(*bundles: Reported, benches: list[report.Bench] | None = None) -> Node:
    return Page(report.page("dist", bundles, benches or [])).root


def resigned(made: Made, change: Callable[[list[dict[str, Any]]], object], *signers: Any) -> Made:
    """The bundle with its kernels' records changed and signed again."""
    document = made.edited()
    change(document["predicate"]["buildDefinition"]["internalParameters"]["kernels"])
    made.put_manifest(canonical.dumps(document), *(signers or (RELEASE,)))
    return made


def banner(page: Node, index: int = 0) -> Node:
    return [node for node in page.all("section") if "banner" in node.classes][index]


def table(page: Node, label: str) -> Node:
    (region,) = page.all("div", role="region", **{"aria-label": label})
    (found,) = region.all("table")
    return found


def row(of: Node, heading: str) -> list[Node]:
    """The cells of the row with this heading, the heading first."""
    rows = [each for each in of.all("tr") if any(th.text == heading for th in each.all("th"))]
    assert len(rows) == 1, (heading, [each.text for each in rows])
    return [cell for cell in rows[0].inside if isinstance(cell, Node)]


# ---- trust


def test_a_bundle_is_shown_as_verified_by_what_vouches_for_it_and_nothing_else(tmp_path: Path) -> None:
    made = synthetic.make(tmp_path / "one")
    for policy, words in (
        (made.policy(with_keys=False), "Verified by pins sm_90a.lock.json"),
        (made.policy(with_pins=False), "Verified by key release"),
        (made.policy(), "Verified by pins sm_90a.lock.json and key release"),
    ):
        verdict = banner(shown(read(made, policy)))
        assert "good" in verdict.classes
        assert [p.text for p in verdict.all("p", **{"class": "verdict"})] == [f"✓ {words}"]


def test_a_commit_is_shown_only_where_a_signature_vouches_for_it(tmp_path: Path) -> None:
    made = synthetic.make(tmp_path / "one")
    assert "1" * 40 in banner(shown(read(made, made.policy(with_pins=False)))).text
    by_pins = banner(shown(read(made, made.policy(with_keys=False)))).text
    assert "1" * 40 not in by_pins
    assert "not vouched for" in by_pins


def test_a_refused_bundle_says_so_and_why_and_never_that_it_is_verified(tmp_path: Path) -> None:
    made = synthetic.make(tmp_path / "one")
    (made.path / "kernseal.h").write_bytes(b"evil")
    (made.path / "<b>.so").write_bytes(b"evil")
    found = read(made)
    page = shown(found)
    assert "bad" in banner(page).classes
    assert "Refused: mismatch" in banner(page).text
    assert "erified" not in banner(page).text
    assert "1 bundle: 0 verified, 1 refused" in page.text
    reasons = [
        r.inside[0].text for r in table(page, "Violations of one").all("tr") if isinstance(r.inside[0], Node)
    ]
    assert reasons == ["Status", "unknown", "mismatch"]
    assert "<b>.so" in table(page, "Violations of one").text
    assert found.verdict["violations"][0]["expected"] in table(page, "Violations of one").text


def test_a_bundle_signed_by_a_stranger_is_refused_and_its_evidence_a_claim(tmp_path: Path) -> None:
    made = resigned(synthetic.make(tmp_path / "one"), lambda kernels: None, STRANGER)
    page = shown(read(made))
    assert "Refused: untrusted_key" in banner(page).text
    cells = table(page, MATRIX).all("td")
    assert [cell.text for cell in cells] == ["(R)claims ran, not vouched for"] * 3
    assert all("claim" in cell.classes and not set(EVIDENCE) & set(cell.classes) for cell in cells)
    assert "(ran)" in table(page, "Kernels of sm_90a").text


def test_a_bundle_whose_manifest_is_no_manifest_is_shown_as_refused(tmp_path: Path) -> None:
    made = synthetic.make(tmp_path / "one")
    (made.path / "manifest.json").write_bytes(b"{}")
    page = shown(read(made))
    assert "Its manifest cannot be read." in banner(page).text
    assert page.all("table") == page.all("section", **{"aria-labelledby": "bundles"})[0].all("table")


def test_a_bundle_without_a_manifest_is_a_bundle_that_is_refused(tmp_path: Path) -> None:
    made = synthetic.make(tmp_path / "one")
    (made.path / "manifest.json").unlink()
    assert report_bundle.find(tmp_path) == [made.path]
    assert "Refused: missing" in banner(shown(read(made))).text


@pytest.mark.parametrize("name", ["manifest.json", "libkernseal.so", f"cubin/{OP}/bf16_hvk.cubin"])
def test_a_bundle_that_changes_after_it_was_verified_is_an_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = synthetic.make(tmp_path / "one")
    verify = report_bundle.verify_report

    def then_swap(*arguments: Any, **options: Any) -> dict[str, Any]:
        verdict = verify(*arguments, **options)
        (made.path / name).write_bytes((made.path / name).read_bytes() + b" ")
        return verdict

    monkeypatch.setattr(report_bundle, "verify_report", then_swap)
    with pytest.raises(Mismatch, match=f"{name}: mismatch.*as it was verified"):
        read(made)


# ---- coverage


def test_the_matrix_has_a_letter_a_class_and_a_word_for_each_evidence(tmp_path: Path) -> None:
    given = {"bf16_hkv": "glue", "bf16_hvk": "retargeted", "f16_hvk": "inspected"}
    one = resigned(
        synthetic.make(tmp_path / "one"), lambda ks: [k.update(evidence=given[k["variant"]]) for k in ks]
    )
    two = resigned(synthetic.make(tmp_path / "two", sm="sm_120a"), lambda kernels: kernels.pop(0))
    page = shown(read(one), read(two))
    matrix = table(page, MATRIX)
    assert [th.text for th in matrix.all("thead")[0].all("th")] == ["Variant", "sm_90a", "sm_120a"]
    found = {name: [(c.text, c.classes) for c in row(matrix, name)[1:]] for name in given}
    assert found == {
        "bf16_hkv": [("Gglue", ["ev", "glue"]), ("Rran", ["ev", "ran"])],
        "bf16_hvk": [("Tretargeted", ["ev", "retargeted"]), ("–not in this bundle", ["none"])],
        "f16_hvk": [("Iinspected", ["ev", "inspected"]), ("Rran", ["ev", "ran"])],
    }


def test_the_legend_has_the_words_of_the_interface_strongest_first() -> None:
    (enum,) = [enum for enum in model.load().enums if enum.name == "kseal_evidence"]
    docs = {constant.name: constant.doc for constant in enum.constants}
    assert tuple(report.LETTERS) == EVIDENCE == tuple(one["name"] for one in report.evidence())
    assert len(set(report.LETTERS.values())) == len(docs)
    (legend,) = shown().all("ul", **{"class": "legend"})
    lines = [li.text for li in legend.all("li")]
    assert lines[: len(docs)] == [f"{report.LETTERS[name]} {name}: {docs[name]}" for name in EVIDENCE]


def test_bundles_of_one_target_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    bundles = [read(synthetic.make(tmp_path / name)) for name in ("one", "two")]
    assert report.columns(bundles) == ["sm_90a one", "sm_90a two"]
    assert report.columns(bundles[:1]) == ["sm_90a"]


# ---- kernels and sizes


def test_every_kernel_of_a_variant_has_its_numbers(tmp_path: Path) -> None:
    more = {"entry": "merge_of_it", "registers": 40, "spill_bytes": 24, "static_smem": 7, "dynamic_smem": 0}
    made = resigned(
        synthetic.make(tmp_path / "one"),
        lambda kernels: kernels[0].update(more_kernels=[more]),  # bf16_hvk
    )
    kernels = table(shown(read(made)), "Kernels of sm_90a")
    first = row(kernels, "bf16_hvk")
    rows = kernels.all("tr")
    second = rows[[r.all("th") and r.all("th")[0].text for r in rows].index("bf16_hvk") + 1]
    assert [cell.text for cell in first[1:7]] == ["kernel_bf16_hvk", "168", "0", "1,024", "200,000", "?"]
    assert first[0].attributes["rowspan"] == "2"
    assert [cell.text for cell in second.all("td")] == ["merge_of_it", "40", "24", "7", "0", "?"]
    assert "spills" in second.all("td")[2].classes
    assert "spills" not in first[3].classes


def test_the_sizes_are_those_of_the_files_by_kind(tmp_path: Path) -> None:
    made = synthetic.make(tmp_path / "one")
    found = read(made)
    files = [path for path in made.path.rglob("*") if path.is_file()]
    assert sum(size.files for size in found.sizes) == len(files)
    assert sum(size.bytes for size in found.sizes) == sum(path.stat().st_size for path in files)
    cubins = list(made.path.glob("cubin/*/*"))
    total = sum(path.stat().st_size for path in cubins)
    sizes = table(shown(found), "Sizes of sm_90a")
    assert [cell.text for cell in row(sizes, "cubin")[1:3]] == [str(len(cubins)), f"{total:,}"]
    assert row(sizes, "Total")[1].text == str(len(files))
    assert f"{len(files)} files, " in banner(shown(found)).text
    sent = sum(len(compressed.pack(path.read_bytes())) for path in cubins)
    assert row(sizes, "cubin")[3].text == f"{sent:,}"
    headings = [th.text for th in sizes.all("tbody")[0].all("th")]
    assert headings == ["cubin", "PTX", "licences", "library", "headers, pins", "manifest, SBOM, packaging"]


@pytest.mark.slow
def test_the_kernels_of_a_built_bundle_are_those_that_inspect_shows(tmp_path: Path) -> None:
    built = bundle("90").path
    wanted = commands_build.kernels_with_occupancy(built)
    public = tmp_path / "tests.json"
    signing_key()  # made, if no test made it
    public.write_bytes((built.parents[2] / "tests.json").read_bytes())
    found = report_bundle.read(
        built, Policy.from_options(keys=[public]), report_changes.read_locks(ROOT / "manifests")
    )
    assert found.verdict["trusted_by"] == ["key:tests"]
    for variant, record in zip(found.variants, wanted, strict=True):
        (kernel,) = variant.kernels
        assert (variant.name, kernel.registers, kernel.spill_bytes) == (
            record["variant"],
            record["registers"],
            record["spill_bytes"],
        )
        assert kernel.fits is not None
        assert kernel.fits.ctas == record["ctas_per_sm"]
    assert found.changes is not None
    assert {move.what for move in found.changes.moves if move.artifact == "kernseal_pins.h"} == {"file"}
    assert "removed" in {move.what for move in found.changes.moves}


# ---- changes


def test_a_bundle_as_pinned_has_no_changes(tmp_path: Path) -> None:
    made = synthetic.make(tmp_path / "one")
    page = shown(read(made, locks=locks_of(made)))
    assert "None: everything is as sm_90a.lock.json has it." in page.text


def test_a_target_without_pins_is_compared_with_nothing(tmp_path: Path) -> None:
    made = synthetic.make(tmp_path / "one", sm="sm_120a")
    other = locks_of(synthetic.make(tmp_path / "two"))
    assert "There are no pins for this target to compare with." in shown(read(made, locks=other)).text


def test_each_change_since_the_pins_is_named_with_the_inputs_that_moved(tmp_path: Path) -> None:
    before = synthetic.make(tmp_path / "before")
    locks = copy.deepcopy(locks_of(before))
    pinned = locks["sm_90a", "linux-x86_64"][1]
    pinned["variants"][f"{OP}/gone"] = copy.deepcopy(pinned["variants"][f"{OP}/bf16_hvk"])
    pinned["files"]["NOTICE"] = "0" * 64
    del pinned["variants"][f"{OP}/f16_hvk"]

    def change(kernels: list[dict[str, Any]]) -> None:
        for kernel in kernels:
            if kernel["variant"] == "bf16_hvk":
                kernel["code_sha256"] = "2" * 64
                kernel["inputs"] = {"source": "3" * 64, "flags": "4" * 64}
            elif kernel["variant"] == "bf16_hkv":
                kernel["inputs"] = {"source": "5" * 64}

    found = read(resigned(before, change), locks=locks).changes
    assert found is not None
    assert {(move.artifact, move.what, move.because) for move in found.moves} == {
        (f"{OP}/gone", "removed", ()),
        (f"{OP}/f16_hvk", "added", ()),
        (f"{OP}/bf16_hvk", "code", ("flags", "source")),
        (f"{OP}/bf16_hkv", "inputs", ("source",)),
        ("NOTICE", "file", ()),
    }
    page = shown(read(before, locks=locks))
    assert row(table(page, f"sm_90a: {report.CHANGES['code']}"), f"{OP}/bf16_hvk")[1].text == "flags, source"
    assert "none" in row(table(page, f"sm_90a: {report.CHANGES['added']}"), f"{OP}/f16_hvk")[1].text


def test_other_bytes_around_the_same_code_are_not_other_code(tmp_path: Path) -> None:
    made = synthetic.make(tmp_path / "one")
    locks = copy.deepcopy(locks_of(made))
    locks["sm_90a", "linux-x86_64"][1]["variants"][f"{OP}/bf16_hvk"]["ptx"] = "0" * 64
    found = read(made, locks=locks).changes
    assert found is not None
    assert [(move.artifact, move.what) for move in found.moves] == [(f"{OP}/bf16_hvk", "metadata")]
    page = shown(read(made, locks=locks))
    assert (
        row(table(page, f"sm_90a: {report.CHANGES['metadata']}"), f"{OP}/bf16_hvk")[1].text
        == "no input moved"
    )


def test_a_manifest_that_alone_differs_is_a_change(tmp_path: Path) -> None:
    made = synthetic.make(tmp_path / "one")
    found = read(resigned(made, lambda kernels: kernels[0].update(registers=1)), locks=locks_of(made)).changes
    assert found is not None
    assert [(move.artifact, move.what) for move in found.moves] == [("manifest.json", "file")]


@pytest.mark.parametrize("inputs", [None, [], "x", {"source": ["x"]}])
def test_inputs_of_another_shape_are_a_change_and_no_crash(inputs: object, tmp_path: Path) -> None:
    made = resigned(synthetic.make(tmp_path / "one"), lambda kernels: kernels[0].update(inputs=inputs))
    found = read(made, locks=locks_of(made)).changes
    assert found is not None
    assert [(move.what, move.because) for move in found.moves] == [("inputs", ("source",))]


def test_every_kind_of_change_has_its_words() -> None:
    source = (ROOT / "export/lock.py").read_text() + (ROOT / "export/report_changes.py").read_text()
    kinds = set(re.findall(r'Move\(\s*[^,]+,\s*"(\w+)"', source)) | {"added", "removed"}
    assert kinds - {"host"} == set(report.CHANGES)  # host objects are no files of a bundle


def test_locks_are_read_from_a_file_or_a_folder(tmp_path: Path) -> None:
    made = synthetic.make(tmp_path / "one")
    path = tmp_path / "pins" / "sm_90a.lock.json"
    path.parent.mkdir()
    path.write_text(json.dumps(made.pins))
    (path.parent / "notes.txt").write_text("not a lock")
    assert report_changes.read_locks(path) == report_changes.read_locks(path.parent) == locks_of(made)
    path.write_text("{}")
    with pytest.raises(Malformed, match=r"sm_90a\.lock\.json"):
        report_changes.read_locks(path)
    assert {target for target, _ in report_changes.read_locks(ROOT / "manifests")} >= {"sm_90a", "sm_120a"}


# ---- the page


def measured(**changes: Any) -> dict[str, Any]:
    """A benchmark document with both kinds of chart."""
    lines = {
        "title": "GPU time",
        "measures": "GPU time of one call, median of 200.",
        "unit": "µs",
        "better": "lower",
        "log": True,
        "x": {"label": "tokens", "log": True},
        "series": {"ours": [[128, 20.125], [2048, 110]], "theirs": [[2048, 230], [64, 90.5]]},
    }
    bars = {
        "title": "Host time",
        "measures": "Host time of one call.",
        "unit": "µs",
        "better": "lower",
        "x": {"label": "caller"},
        "series": {"GDN": [["C", 2.4], ["Python", 7]], "_XQA": [["C", 2]]},
    }
    provenance = {
        "device": "A GPU",
        "driver": "580.1",
        "commit": "a" * 40,
        "dirty": False,
        "date": "2026-12-01",
        "command": "make bench",
        "versions": {"triton": "3.6"},
    }
    return {"schema": 1, "title": "Speed", "provenance": provenance, "charts": [lines, bars], **changes}


def document(folder: Path, data: object, name: str = "speed.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(data))
    return path


def whole_page(folder: Path) -> Node:
    """Everything that a page can have: verified and refused bundles, changes, charts, a dirty tree."""
    good, bad = synthetic.make(folder / "sm_90a"), synthetic.make(folder / "sm_120a", sm="sm_120a")
    (bad.path / "kernseal.h").unlink()
    data = measured()
    data["provenance"]["dirty"] = True
    benches = report.draw(
        [bench.read(document(folder, measured())), bench.read(document(folder, data, "dirty.json"))]
    )
    locks = copy.deepcopy(locks_of(good))
    del locks["sm_90a", "linux-x86_64"][1]["variants"][f"{OP}/f16_hvk"]
    return shown(read(good, locks=locks), read(bad, locks=locks), benches=benches)


def test_the_page_is_whole_by_itself_and_has_no_script(tmp_path: Path) -> None:
    page = whole_page(tmp_path)
    assert page.all("script") == page.all("link") == page.all("img") == page.all("iframe") == []
    (policy,) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy.attributes["content"] == "default-src 'none'; style-src 'unsafe-inline'"
    for node in page.walk():
        assert not [name for name in node.attributes if name.startswith("on")], node
        for name in ("href", "src", "xlink:href"):
            assert node.attributes.get(name, "#").startswith("#"), node
    assert "@import" not in page.text
    assert not re.search(r"url\((?!#)", page.text)


def test_the_page_can_be_read_without_seeing_it(tmp_path: Path) -> None:
    page = whole_page(tmp_path)
    assert [node.attributes["lang"] for node in page.all("html")] == ["en"]
    ids = [node.attributes["id"] for node in page.walk() if "id" in node.attributes]
    assert len(set(ids)) == len(ids)
    for node in page.walk():
        assert set(node.attributes.get("aria-labelledby", "").split()) <= set(ids), node
        assert node.attributes.get("href", "#").removeprefix("#") in ("", *ids), node
        assert node.tag != "th" or node.attributes.get("scope"), node
        assert node.tag != "svg" or node.attributes["role"] == "img", node
    levels = [int(node.tag[1]) for node in page.walk() if re.fullmatch("h[1-6]", node.tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    regions = page.all("div", role="region")
    assert all(region.attributes["aria-label"] and region.attributes["tabindex"] == "0" for region in regions)
    named = [region.attributes["aria-label"] for region in regions] + [h2.text for h2 in page.all("h2")]
    assert len(set(named)) == len(named)
    assert len(page.all("table")) == sum(len(region.all("table")) for region in regions)


def luminance(colour: str) -> float:
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one: str, two: str) -> float:
    light, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_text_stands_out_from_its_background_in_light_and_dark() -> None:
    text = (report.TEMPLATES / "report.html.j2").read_text()
    themes = [
        dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", block))
        for block in re.findall(r":root \{(.*?)\}", text, re.S)
    ]
    assert len(themes) == 2
    for theme in themes:
        pairs = [(name, paper) for name in ("ink", "muted", "link", "bad") for paper in ("paper", "band")]
        pairs += [(f"{name}-ink", name) for name in EVIDENCE]
        pairs += [(name, f"{name}-paper") for name in ("good", "bad", "warn")]
        pairs += [(name, f"{kind}-paper") for name in ("ink", "muted") for kind in ("good", "bad")]
        assert not [pair for pair in pairs if contrast(theme[pair[0]], theme[pair[1]]) < 4.5]
    papers = (charts.PAPER, charts.DARK[charts.PAPER])
    assert min(contrast(colour, paper) for colour in charts.COLOURS for paper in papers) >= 3
    for name in (charts.INK, charts.MUTED, charts.WARNING):
        assert min(contrast(name, papers[0]), contrast(charts.DARK[name], papers[1])) >= 4.5


def test_hostile_names_are_shown_as_they_are_and_do_nothing(tmp_path: Path) -> None:
    def rename(kernels: list[dict[str, Any]]) -> None:
        kernels[0].update(op=HOSTILE, variant=HOSTILE, entry=HOSTILE)

    made = resigned(synthetic.make(tmp_path / "<img src=x>&"), rename)
    data = measured(title=HOSTILE)
    data["provenance"] |= dict.fromkeys(("device", "driver", "command"), HOSTILE)
    data["provenance"]["versions"] = {HOSTILE: HOSTILE}
    for chart in data["charts"]:
        chart |= {"title": HOSTILE, "measures": HOSTILE, "unit": HOSTILE, "x": {"label": HOSTILE}}
        chart["series"] = {HOSTILE: [["$\\frac{$", 1], [HOSTILE, 2]]}
    drawn = report.draw([bench.read(document(tmp_path, data))])
    page = shown(read(made), benches=drawn)
    assert page.all("script") == page.all("img") == []
    assert not [node for node in page.walk() for name in node.attributes if name.startswith("on")]
    assert HOSTILE in table(page, MATRIX).text
    assert page.text.count(HOSTILE) >= 15
    assert "<img src=x>&" in page.text
    ET.fromstring(drawn[0].drawn[0].svg)


def test_the_same_inputs_give_the_same_page_wherever_they_lie(tmp_path: Path) -> None:
    pages = []
    for seed in ("1", "2"):
        folder = tmp_path / seed / "dist"
        made = synthetic.make(folder / "sm_90a")
        lock = tmp_path / seed / "sm_90a.lock.json"
        lock.write_text(json.dumps(made.pins))
        speed = document(tmp_path / seed, measured())
        (tmp_path / seed / "matplotlibrc").write_text(
            f"xtick.major.size: {seed}\n"
        )  # the user's, who is not asked
        out = tmp_path / seed / "out.html"
        options = ["--pins", lock, "--bench", speed, "--out", out, "--svg", tmp_path / seed / "svg", "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "kernseal.export.cli", "report", "dist", *map(str, options)],
            cwd=tmp_path / seed,
            env={
                **os.environ,
                "PYTHONHASHSEED": seed,
                "MATPLOTLIBRC": str(tmp_path / seed / "matplotlibrc"),
            },
            capture_output=True,
            text=True,
            check=True,
        )
        pictures = {path.name: path.read_bytes() for path in (tmp_path / seed / "svg").iterdir()}
        assert json.loads(done.stdout)["bundles"][0]["trusted_by"] == ["pins:sm_90a.lock.json"]
        pages.append((out.read_bytes(), pictures))
    assert pages[0] == pages[1]
    assert sorted(pages[0][1]) == ["speed-gpu-time.svg", "speed-host-time.svg"]


# ---- benchmarks


def test_a_chart_is_a_picture_with_words_and_every_number(tmp_path: Path) -> None:
    drawn = report.draw([bench.read(document(tmp_path, measured()))])
    page = shown(benches=drawn)
    lines, bars = page.all("figure")
    assert lines.all("title")[0].text == "GPU time"
    words = lines.all("desc")[0].text
    assert "Both axes are logarithmic." in words
    assert "theirs: 90.5 at 64 to 230 at 2,048." in words
    numbers = table(page, "Numbers of GPU time, speed.json")
    found = {
        r[0].text: [cell.text for cell in r[1:]] for r in (row(numbers, x) for x in ("64", "128", "2,048"))
    }
    assert found == {"64": ["–", "90.5"], "128": ["20.125", "–"], "2,048": ["110", "230"]}
    assert [cell.text for cell in row(table(page, "Numbers of Host time, speed.json"), "Python")[1:]] == [
        "7",
        "–",
    ]
    assert {"tokens, logarithmic", "µs, logarithmic, lower is better"} <= {n.text for n in lines.all("text")}
    pictured = [node.text for node in bars.all("text")]
    assert {"GDN", "2.4", "C", "Python", "µs, lower is better"} <= set(pictured)
    assert any("_XQA" in label for label in pictured)
    facts = page.all("section", **{"aria-labelledby": "benchmarks"})[0].all("dl")[0].text
    for fact in (
        "A GPU, 580.1",
        "a" * 40 + " (clean)",
        "2026-12-01",
        "make bench",
        "triton 3.6",
        "speed.json",
    ):
        assert fact in facts


def test_no_two_series_of_a_chart_look_alike_and_none_needs_its_colour() -> None:
    most = json.loads(bench.SCHEMA.read_text())["$defs"]["chart"]["properties"]["series"]["maxProperties"]
    for style in (charts.line_style, charts.bar_style):
        assert len({str(style(index)) for index in range(most)}) == most
    assert len({charts.line_style(index)["marker"] for index in range(most)}) == most
    assert len({charts.bar_style(index)["hatch"] for index in range(len(charts.COLOURS))}) == len(
        charts.COLOURS
    )


def test_numbers_of_a_dirty_tree_come_with_a_warning_on_the_page_and_in_the_picture(tmp_path: Path) -> None:
    data = measured()
    clean = report.draw([bench.read(document(tmp_path, data))])
    data["provenance"]["dirty"] = True
    dirty = report.draw([bench.read(document(tmp_path, data))])
    assert shown(benches=clean).all("p", role="note") == []
    (warning,) = shown(benches=dirty).all("p", role="note")
    assert warning.text.startswith("Warning: measured on a tree that differs from its commit.")
    for drawn in dirty[0].drawn:
        assert "WARNING: not of a commit" in drawn.svg
        assert charts.WARNING in drawn.svg.split("</style>", 1)[1]
    assert "WARNING" not in clean[0].drawn[0].svg


def put(data: Any, where: str, value: object) -> None:
    *parents, last = where.split(".")
    for part in parents:
        data = data[int(part) if isinstance(data, list) else part]
    if value is None:
        del data[last]
    else:
        data[int(last) if isinstance(data, list) else last] = value


@pytest.mark.parametrize(
    ("where", "value", "named", "words"),
    [
        ("schema", 2, "schema", "1 was expected"),
        ("title", None, "top level", "'title' is a required property"),
        ("surprise", 1, "top level", "'surprise' was unexpected"),
        ("provenance.dirty", None, "provenance", "'dirty' is a required property"),
        ("provenance.dirty", "no", "provenance.dirty", "not of type 'boolean'"),
        ("provenance.commit", "main", "provenance.commit", "does not match"),
        ("provenance.date", "yesterday", "provenance.date", "does not match"),
        ("provenance.command", "", "provenance.command", "non-empty"),
        ("charts", [], "charts", "non-empty"),
        ("charts.0.better", "bigger", "charts.0.better", "is not one of"),
        ("charts.1.unit", None, "charts.1", "'unit' is a required property"),
        ("charts.0.title", "a\u0000b", "charts.0.title", "should not be valid"),
        ("charts.0.title", "a\u202eb", "charts.0.title", "should not be valid"),
        ("charts.0.series", {}, "charts.0.series", "non-empty"),
        ("charts.0.series.ours", [[1]], "charts.0.series.ours.0", "too short"),
        ("charts.0.series.ours", [[1, "2"]], "charts.0.series.ours.0.1", "not of type 'number'"),
        ("charts.0.series.ours.1.0", "many", "charts.0.series.ours.0.0", "other x of this chart are names"),
        ("charts.0.series.ours.1.0", 128, "charts.0.series.ours", "an x is there twice"),
        ("charts.0.series.ours.1.1", 0, "charts.0.series.ours.1.1", "more than 0"),
        ("charts.0.series.ours.0.0", -1, "charts.0.series.ours.0.0", "more than 0"),
        ("charts.1.series.GDN.0.1", 10**400, "charts.1.series.GDN.0.1", "a finite number"),
        ("charts.1.x.log", True, "charts.1.x.log", "names"),
    ],
)
def test_a_benchmark_that_does_not_fit_is_refused_by_file_and_field(
    where: str, value: object, named: str, words: str, tmp_path: Path
) -> None:
    data = measured()
    put(data, where, value)
    path = document(tmp_path, data)
    with pytest.raises(Malformed) as caught:
        bench.read(path)
    assert str(caught.value).startswith(f"{path}: {named}: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ('{"schema": 1, "schema": 1}', "'schema' is there twice"),
        (json.dumps(measured()).replace("20.125", "NaN"), "NaN is no number of JSON"),
        (json.dumps(measured()).replace("20.125", "-Infinity"), "Infinity is no number"),
        (json.dumps(measured()).replace("20.125", "1e999"), "charts.0.series.ours.0.1: inf"),
        ("[]", "top level"),
    ],
)
def test_what_is_no_json_of_numbers_is_no_benchmark(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "speed.json"
    path.write_text(text)
    with pytest.raises(Malformed, match=re.escape(str(path))) as caught:
        bench.read(path)
    assert words in str(caught.value)


def test_the_example_in_the_documentation_is_a_benchmark(tmp_path: Path) -> None:
    (example,) = re.findall(r"```json\n(.*?)```", (ROOT / "docs/report.md").read_text(), re.S)
    path = tmp_path / "example.json"
    path.write_text(example)
    assert bench.read(path).charts
    assert set(json.loads(example)["provenance"]) >= {
        "device",
        "driver",
        "commit",
        "dirty",
        "date",
        "command",
    }


def test_without_matplotlib_only_plots_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    read_document = bench.read(document(tmp_path, measured()))
    with pytest.raises(Unsupported, match=r"install kernseal\[report\]"):
        report.draw([read_document])
    assert report.draw([]) == []


# ---- the command


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    """A folder of bundles, with its pins beside it."""
    pins = tmp_path / "pins"
    pins.mkdir()
    for sm in ("sm_90a", "sm_100a"):
        made = synthetic.make(tmp_path / "dist" / sm, sm=sm)
        (pins / f"{sm}.lock.json").write_text(json.dumps(made.pins))
    return tmp_path / "dist"


def test_the_command_writes_the_page_and_the_same_pictures(dist: Path, tmp_path: Path) -> None:
    speed = document(tmp_path, measured())
    out, svg = tmp_path / "new" / "report.html", tmp_path / "svg"
    done = invoke(dist, "--pins", tmp_path / "pins", "--bench", speed, "--out", out, "--svg", svg, "--json")
    told = json.loads(done.output)
    assert [(one["target"], one["accepted"], one["trusted_by"]) for one in told["bundles"]] == [
        ("sm_90a", True, ["pins:sm_90a.lock.json"]),
        ("sm_100a", True, ["pins:sm_100a.lock.json"]),
    ]
    html = out.read_text()
    for picture in told["svg"]:
        text = Path(picture).read_text()
        assert text in html
        assert ET.fromstring(text).attrib["role"] == "img"
    assert sorted(path.name for path in tmp_path.glob("new/*")) == ["report.html"]


def test_a_folder_of_benchmarks_is_every_document_in_it(dist: Path, tmp_path: Path) -> None:
    folder = tmp_path / "measured"
    folder.mkdir()
    options = ("--pins", tmp_path / "pins", "--out", tmp_path / "r.html", "--bench", folder)
    done = invoke(dist, *options)
    assert (done.exit_code, f"--bench {folder}: no *.json in it" in done.output) == (2, True)
    for name in ("two.json", "one.json"):
        document(folder, measured(), name)
    done = invoke(dist, *options, "--svg", tmp_path / "svg", "--json")
    drawn = [Path(picture).stem for picture in json.loads(done.output)["svg"]]
    assert drawn == ["one-gpu-time", "one-host-time", "two-gpu-time", "two-host-time"]


def test_the_command_tells_people_what_is_refused(dist: Path, tmp_path: Path) -> None:
    (dist / "sm_100a" / "kernseal.h").write_bytes(b"evil")
    done = invoke(dist, "--pins", tmp_path / "pins", "--out", tmp_path / "r.html")
    assert done.exit_code == 0
    assert "2 bundles, 1 verified; refused: sm_100a" in done.output


def test_one_bundle_may_be_given_by_itself(dist: Path, tmp_path: Path) -> None:
    done = invoke(dist / "sm_90a", "--pins", tmp_path / "pins", "--out", tmp_path / "r.html", "--json")
    assert [one["bundle"] for one in json.loads(done.output)["bundles"]] == ["sm_90a"]


def test_a_folder_without_a_bundle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty" / "other").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    for name, words in (("empty", "no bundle in it"), ("none", "not a folder"), ("file", "not a folder")):
        with pytest.raises(InvalidArgument, match=f"{name}: {words}"):
            report_bundle.find(tmp_path / name)


def test_unfinished_bundles_are_left_out(dist: Path) -> None:
    (dist / "sm_90a").rename(dist / ".sm_90a.partial")
    assert [path.name for path in report_bundle.find(dist)] == ["sm_100a"]


@pytest.mark.parametrize("option", ["--out", "--svg"])
def test_nothing_is_written_into_a_bundle(option: str, dist: Path, tmp_path: Path) -> None:
    before = sorted(dist.rglob("*"))
    speed = document(tmp_path, measured())
    done = invoke(
        dist,
        "--pins",
        tmp_path / "pins",
        "--bench",
        speed,
        "--out",
        tmp_path / "r.html",
        option,
        dist / "sm_90a/x",
    )
    assert done.exit_code == 2
    assert "inside of the bundle" in done.output
    assert sorted(dist.rglob("*")) == before


def test_a_report_that_fails_leaves_the_old_one(dist: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    out.write_text("the old one")
    done = invoke(dist, "--pins", tmp_path / "pins", "--bench", document(tmp_path, {}), "--out", out)
    assert done.exit_code == Malformed.exit_code
    assert out.read_text() == "the old one"


def test_two_charts_are_never_written_to_one_file(dist: Path, tmp_path: Path) -> None:
    data = measured()
    data["charts"][1]["title"] = "gpu TIME!"
    speed = document(tmp_path, data)
    options = ("--pins", tmp_path / "pins", "--out", tmp_path / "r.html", "--bench", speed)
    done = invoke(dist, *options, "--svg", tmp_path / "svg")
    assert done.exit_code == 2
    assert "speed-gpu-time.svg" in done.output
    assert invoke(dist, *options).exit_code == 0


def test_pins_of_the_command_are_checked(dist: Path, tmp_path: Path) -> None:
    made = tmp_path / "pins" / "sm_90a.lock.json"
    parse_pins(made.read_bytes(), made.name)
    made.write_text("{}")
    assert (
        invoke(dist, "--pins", tmp_path / "pins", "--out", tmp_path / "r.html").exit_code
        == Malformed.exit_code
    )
