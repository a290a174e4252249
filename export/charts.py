"""Charts of a benchmark document to SVG: the same bytes for the same numbers, readable alone and inside a page."""

from __future__ import annotations

import io
import textwrap
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kernseal.export.bench import Chart, Document, Provenance, X
from kernseal.loader.errors import Unsupported

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
WIDTH = 420 / 72
"""Inches; at a phone's width text is still 8 pixels high."""
PLOT = 190 / 72
BAR, GROUP_GAP, LABEL_LINE, FOOTER = 15 / 72, 12 / 72, 14 / 72, 15 / 72
FONT = 10.5
INK, MUTED, GRID, PAPER, WARNING = "#1f2328", "#57606a", "#d0d7de", "#ffffff", "#a40e26"
DARK = {INK: "#e6edf3", MUTED: "#9da7b3", GRID: "#3d444d", PAPER: "#0d1117", WARNING: "#ff8182"}
# Each stands out from both papers by 3:1 at least; nothing is told by colour alone.
COLOURS = ("#0072b2", "#c4570a", "#0b8a63", "#b0568c", "#7a6a00", "#6a6fd0")
MARKERS = "osD^vPX*<>hd"
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
HATCHES = ("", "///", "...", "\\\\\\", "xxx", "---")
LOGARITHMIC = ", logarithmic"
"""On the label of such an axis: bars on one begin where its first decade does, not at 0."""
STYLE: dict[str, Any] = {
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": FONT + 1.5,
    "axes.titleweight": "bold",
    "font.family": "DejaVu Sans",
    "font.size": FONT,
    "grid.color": GRID,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
}


def describe(chart: Chart) -> str:
    """The chart in words, for who cannot see it: what is compared, and where each series begins and ends."""
    lines = [
        f"{chart.measures} In {chart.unit}; {chart.better} is better. Over {chart.x_label}."
        f"{' Both axes are' if chart.log and chart.x_log else ' The axis of values is' if chart.log else ''}"
        f"{' logarithmic.' if chart.log else ' The axis below is logarithmic.' if chart.x_log else ''}"
    ]
    for name, points in chart.series.items():
        if chart.named:
            lines.append(f"{name}: " + ", ".join(f"{x} {number(y)}" for x, y in points) + ".")
        else:
            (first, low), (last, high) = points[0], points[-1]
            ends = f"{number(low)} at {text(first)}"
            lines.append(
                f"{name}: {ends}" + (f" to {number(high)} at {text(last)}." if len(points) > 1 else ".")
            )
    return "\n".join(lines)


def number(value: float, digits: int = 4) -> str:
    """For people: ``digits`` that count, thousands apart."""
    size = abs(value)
    if value == int(value) and size < 1e15:
        return f"{int(value):,}"
    if 10**digits <= size < 1e15:
        return f"{value:,.0f}"
    return f"{value:,.{digits}g}" if 1e-3 <= size < 1e15 else f"{value:.{digits - 1}e}"


def text(x: X) -> str:
    return x if isinstance(x, str) else number(x)


def draw(document: Document, chart: Chart, prefix: str) -> str:
    """The chart as one ``<svg>`` element, its provenance inside.

    Args:
        prefix: begins every id in it, so that several may be on one page.

    Raises:
        Unsupported: matplotlib is not installed.
    """
    footer = _footer(document.provenance)
    below = FOOTER * (1 + footer.count("\n"))
    with _matplotlib() as figure_of:
        figure = figure_of(figsize=(WIDTH, _height(chart) + below), layout="constrained")
        above, bottom = figure.subfigures(2, 1, height_ratios=(_height(chart), below))
        axes = above.add_subplot()
        (_bars if chart.named else _lines)(axes, chart)
        _label(above, axes, chart)
        colour = WARNING if document.provenance.dirty else MUTED
        bottom.text(0.01, 0.9, footer, va="top", fontsize=FONT - 1.5, color=colour)
        return _svg(figure, chart, prefix)


@contextmanager
def _matplotlib() -> Iterator[Any]:
    """matplotlib's ``Figure`` with our settings and none of the user's."""
    try:
        import matplotlib.style
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Unsupported(f"--bench: {error}; install kernseal[report]") from None
    with warnings.catch_warnings(), matplotlib.style.context(["default", STYLE]):
        warnings.simplefilter("ignore")  # letters that its font lacks: the viewer's font may have them
        yield Figure


def _height(chart: Chart) -> float:
    if not chart.named:
        return PLOT + 1.1 + 0.22 * _legend_rows(chart)
    groups = len(chart.xs) * (len(chart.series) * BAR + _gap(chart))
    return groups + 1.35 + (0.22 * _legend_rows(chart) if len(chart.series) > 1 else 0)


def _gap(chart: Chart) -> float:
    """Between groups of bars, so that the label of each has room for its lines."""
    lines = max(_wrapped(x).count("\n") + 1 for x in chart.xs)
    return max(GROUP_GAP, lines * LABEL_LINE - len(chart.series) * BAR)


def _wrapped(x: X) -> str:
    return textwrap.fill(text(x), 22)


def _columns(chart: Chart) -> int:
    return 2 if max(len(name) for name in chart.series) <= 24 else 1


def _legend_rows(chart: Chart) -> int:
    return -(-len(chart.series) // _columns(chart))


def line_style(index: int) -> dict[str, Any]:
    """How the series at ``index`` is drawn, unlike any other of a chart."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[index % len(DASHES)],
        "marker": MARKERS[index % len(MARKERS)],
    }


def bar_style(index: int) -> dict[str, Any]:
    """As ``line_style``; each round of the colours has the hatches shifted by one."""
    rounds = index // len(COLOURS)
    return {"color": COLOURS[index % len(COLOURS)], "hatch": HATCHES[(index + rounds) % len(HATCHES)]}


def _lines(axes: Any, chart: Chart) -> None:
    for index, (name, points) in enumerate(chart.series.items()):
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            label=_plain(name),
            **line_style(index),
            markersize=5,
            linewidth=1.6,
        )
    axes.set_xscale("log" if chart.x_log else "linear")
    axes.set_yscale("log" if chart.log else "linear")
    if not chart.log and min(y for points in chart.series.values() for _, y in points) >= 0:
        axes.set_ylim(bottom=0)
    if chart.x_log:
        _ticks_at_points(axes, chart)
    axes.grid(True)
    axes.set_axisbelow(True)
    axes.set_xlabel(textwrap.fill(chart.x_label + (LOGARITHMIC if chart.x_log else ""), 50))
    axes.yaxis.set_major_formatter(lambda value, _: number(value))


def _ticks_at_points(axes: Any, chart: Chart) -> None:
    """Sizes are powers of two, which no decade marks: at most six of them, evenly chosen."""
    from matplotlib.ticker import NullLocator

    xs = chart.xs
    chosen = xs[:: max(1, -(-len(xs) // 6))]
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(chosen, [text(x) for x in chosen])


def _bars(axes: Any, chart: Chart) -> None:
    names, many, gap = chart.xs, len(chart.series), _gap(chart)
    step = BAR * many + gap
    for index, (name, points) in enumerate(chart.series.items()):
        at = [names.index(x) * step + index * BAR for x, _ in points]
        bars = axes.barh(
            at,
            [y for _, y in points],
            height=BAR * 0.9,
            label=_plain(name),
            **bar_style(index),
            edgecolor=PAPER,
        )
        axes.bar_label(bars, [number(y) for _, y in points], padding=3, fontsize=FONT - 1)
    middle = (many - 1) * BAR / 2
    axes.set_yticks([i * step + middle for i in range(len(names))], [_wrapped(x) for x in names])
    axes.set_ylim(len(names) * step - BAR / 2 - gap / 2, -BAR / 2 - gap / 2)
    axes.tick_params(axis="y", length=0)
    axes.set_xscale("log" if chart.log else "linear")
    axes.margins(x=0.16)
    axes.xaxis.set_major_formatter(lambda value, _: number(value))
    axes.grid(True, axis="x")
    axes.set_axisbelow(True)


def _plain(name: str) -> str:
    """A label that begins with _ is none to matplotlib; a zero-width space in front makes it one."""
    return "\u200b" + name if name.startswith("_") else name


def _label(figure: Any, axes: Any, chart: Chart) -> None:
    unit = f"{chart.unit}{LOGARITHMIC if chart.log else ''}, {chart.better} is better"
    figure.suptitle(textwrap.fill(chart.title, 52), x=0.01, ha="left", fontsize=FONT + 1.5, fontweight="bold")
    if chart.named:
        axes.set_xlabel(textwrap.fill(unit, 50))
    else:
        axes.set_title(textwrap.fill(unit, 56), loc="left", fontsize=FONT, fontweight="normal")
    if len(chart.series) > 1:
        figure.legend(loc="outside lower left", ncols=_columns(chart))


def _footer(provenance: Provenance) -> str:
    """What the numbers are of, in the picture: one that is taken out of its page still says so."""
    warning = "WARNING: not of a commit, the tree differed from it. " if provenance.dirty else ""
    commit = f"{provenance.commit[:12]}{' (dirty)' if provenance.dirty else ''}"
    of = f"{provenance.device}, driver {provenance.driver}, commit {commit}, {provenance.date[:10]}"
    return textwrap.fill(warning + of, 68)


def _svg(figure: Any, chart: Chart, prefix: str) -> str:
    import matplotlib

    out = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": prefix}):
        figure.savefig(out, format="svg")
    root = ET.fromstring(out.getvalue())  # noqa: S314  (written in the line above)
    _own_ids(root, prefix)
    for metadata in root.findall(f"{{{SVG}}}metadata"):  # the time, among others
        root.remove(metadata)
    title, desc, style = (ET.Element(f"{{{SVG}}}{name}") for name in ("title", "desc", "style"))
    title.set("id", f"{prefix}-title")
    desc.set("id", f"{prefix}-desc")
    title.text, desc.text, style.text = chart.title, describe(chart), _dark_style()
    root[:0] = [title, desc, style]
    root.set("role", "img")
    root.set("aria-labelledby", f"{prefix}-title {prefix}-desc")
    ET.register_namespace("", SVG)
    ET.register_namespace("xlink", XLINK)
    return ET.tostring(root, encoding="unicode") + "\n"


def _own_ids(root: ET.Element, prefix: str) -> None:
    for element in root.iter():
        for name, value in element.attrib.items():
            if name == "id":
                element.set(name, f"{prefix}-{value}")
            elif name in ("href", f"{{{XLINK}}}href") and value.startswith("#"):
                element.set(name, f"#{prefix}-{value[1:]}")
            elif "url(#" in value:
                element.set(name, value.replace("url(#", f"url(#{prefix}-"))
            if name == "style":
                element.set(
                    name,
                    element.attrib[name].replace("'DejaVu Sans'", "system-ui, 'DejaVu Sans', sans-serif"),
                )


def _dark_style() -> str:
    """The neutral colours where the reader's screen is dark; paper and print stay light."""
    rules = [
        f'[style*="{kind}: {light}"] {{ {kind}: {dark} !important }}'
        for light, dark in DARK.items()
        for kind in ("fill", "stroke")
    ]
    return "@media screen and (prefers-color-scheme: dark) { " + " ".join(rules) + " }"
