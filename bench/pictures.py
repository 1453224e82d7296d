"""The report's pictures: speed-ups, error against time, roofline. Drawn with matplotlib, written as SVG and PNG."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: E402
from matplotlib.transforms import Bbox  # noqa: E402

from bench.store import Record  # noqa: E402

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
COLOURS = {"fp32": "#2b6cb0", "tf32": "#2c7a7b", "fp16": "#b7791f", "bf16": "#9b2c2c"}
plt.rcParams.update({
    "svg.hashsalt": "bench", "svg.fonttype": "path", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.alpha": 0.25, "axes.axisbelow": True, "figure.constrained_layout.use": True,
})  # fmt: skip


_SHORT = {"groupnorm": "norm", "biasadd": "bias", "maxpool": "pool", "conv2d": "conv", "small": "(small)"}


def short(spec: str) -> str:
    """A system's name, short enough for an axis: `gemm_biasadd_hardtanh_mish_groupnorm` -> `gemm bias hardtanh mish norm`."""
    return " ".join(_SHORT.get(word, word) for word in spec.split("_"))


def _save(figure, folder: Path, name: str) -> str:
    """Write <name>.svg and .png without dates; returns the SVG text."""
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})
    figure.savefig(folder / f"{name}.png", dpi=150, metadata={"Software": None})
    plt.close(figure)
    text = (folder / f"{name}.svg").read_text(encoding="utf-8")
    return text[text.index("<svg") :]


def speedups(records: list[Record], folder: Path) -> str:
    """Bars by system and precision: over the fastest of PyTorch's own, and a mark for the fastest peer of equal or better accuracy."""
    shown = [r for r in records if r["speedup_torch"]]
    figure, axis = plt.subplots(figsize=(5.4, 1.3 + 0.26 * max(len(shown), 1)))
    labels = [f"{short(r['spec'])}, {r['precision']}" + (", prepared" if r["weights"] == "prepared" else "") for r in shown]
    places = list(range(len(shown)))[::-1]
    axis.barh(places, [r["speedup_torch"] for r in shown], 0.62, color=[COLOURS[r["precision"]] for r in shown], alpha=0.85)
    marked = [(r["speedup"], p) for r, p in zip(shown, places, strict=True) if r["speedup"]]
    axis.plot([m[0] for m in marked], [m[1] for m in marked], "k|", markersize=13, markeredgewidth=2, label="over the fastest peer of equal or better accuracy")
    axis.axvline(1.0, color="black", linewidth=0.8)
    for record, place in zip(shown, places, strict=True):
        axis.text(max(record["speedup_torch"], record["speedup"] or 0), place, f"  {record['speedup_torch']:.2f}x", va="center", fontsize=8)
    axis.set_yticks(places, labels, fontsize=7)
    axis.set_xlabel("bar: times as fast as PyTorch's best")
    axis.set_xlim(0, 1.15 * max([1.0, *(max(r["speedup_torch"], r["speedup"] or 0) for r in shown)]))
    axis.grid(False, axis="y")
    if marked:
        axis.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), fontsize=7, frameon=False)
    return _save(figure, folder, "speedups")


# Where a label may stand: offset from its point in typographic points, and which side of the text lies there.
_PLACES = [
    ((0, 6), "center", "bottom"), ((0, -6), "center", "top"), ((6, 0), "left", "center"), ((-6, 0), "right", "center"), ((5, 7), "left", "bottom"),
    ((-5, 7), "right", "bottom"), ((5, -7), "left", "top"), ((-5, -7), "right", "top"), ((0, 15), "center", "bottom"), ((0, -15), "center", "top"),
]  # fmt: skip
_SAME = 0.04  # points closer than this share of the axes in both directions share a label


def merged(points: list[tuple[str, float, float]], near: float = _SAME) -> list[tuple[str, float, float]]:
    """Labels of points in axes coordinates (0..1); those of near neighbours are joined, at the first one's place, the same text once."""
    groups: list[tuple[list[str], float, float]] = []
    for text, x, y in points:
        for texts, other_x, other_y in groups:
            if abs(x - other_x) < near and abs(y - other_y) < near:
                texts += [text] if text not in texts else []
                break
        else:
            groups.append(([text], x, y))
    return [(", ".join(texts), x, y) for texts, x, y in groups]


def _label(axis, points: list[tuple[str, float, float]], marks: list[tuple[float, float]]) -> list:
    """Write the labels of `points` where they cover neither each other nor `marks`, as far as _PLACES allows."""
    figure = axis.figure
    figure.canvas.draw()  # the layout and the scales are known from here on
    renderer, inside = figure.canvas.get_renderer(), axis.get_window_extent()
    to_axes = lambda x, y: axis.transAxes.inverted().transform(axis.transData.transform((x, y)))  # noqa: E731
    pixel = [axis.transData.transform(mark) for mark in marks]
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in pixel]
    placed = []
    for text, x, y in merged([(text, *to_axes(x, y)) for text, x, y in points]):
        best = None
        for offset, ha, va in _PLACES:
            note = axis.annotate(text, (x, y), xycoords="axes fraction", xytext=offset, textcoords="offset points", ha=ha, va=va, fontsize=6, alpha=0.8)
            note.set_in_layout(False)
            box = note.get_window_extent(renderer).padded(2)
            cost = sum(box.overlaps(other) for other in taken) + 2 * (box.x0 < inside.x0 or box.x1 > inside.x1 or box.y0 < inside.y0 or box.y1 > inside.y1)
            if best is None or cost < best[0]:
                if best is not None:
                    best[1].remove()
                best = (cost, note, box)
            else:
                note.remove()
            if not cost:
                break
        taken.append(best[2])
        placed.append(best[1])
    return placed


def error_against_time(records: list[Record], folder: Path, name: str) -> str:
    """One system: every contender's relative error over its time, ours filled; lower left is better."""
    figure, axis = plt.subplots(figsize=(5.4, 3.8))
    labels, marks = [], []
    for record in records:
        colour = COLOURS[record["precision"]]
        rows = [(n, p) for n, p in record["peers"].items() if p["rel_error"]]
        axis.scatter([p["ms"] for _, p in rows], [p["rel_error"] for _, p in rows], s=30, facecolors="none", edgecolors=colour)
        axis.scatter(record["ours"]["ms"], record["ours"]["rel_error"], s=70, color=colour, marker="D", label=f"ours, {record['precision']}", zorder=3)
        marks += [(p["ms"], p["rel_error"]) for _, p in rows] + [(record["ours"]["ms"], record["ours"]["rel_error"])]
        labels += [(n.removesuffix(" + compiled tail"), p["ms"], p["rel_error"]) for n, p in rows if n in (record["best_peer"], record["best_torch"], "eager")]
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("milliseconds (median, L2 flushed)")
    axis.set_ylabel("relative error against float64")
    axis.set_title(short(records[0]["spec"]), fontsize=9)
    for ticks in (axis.xaxis, axis.yaxis):
        low, high = ticks.get_data_interval()
        if ticks is axis.xaxis or high < 10 * low:  # less than a decade: 1, 2 and 5 are named, or more where that would be none
            subs = (1, 2, 5) if high > 3 * low else (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
            ticks.set_major_locator(LogLocator(subs=subs))
            ticks.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            ticks.set_minor_formatter(NullFormatter())
    axis.margins(x=0.18, y=0.12)
    axis.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4)
    _label(axis, labels, marks)
    return _save(figure, folder, f"error-{name}")


def roofline(records: list[Record], machine: dict, folder: Path) -> str:
    """TFLOP/s over FLOP per byte with the card's measured ceilings; ours filled, the fastest peer of the whole chain hollow."""
    figure, axis = plt.subplots(figsize=(5.4, 4.0))
    rates = machine["ceilings"]
    tensor = max(rates["fp16_tflops"], rates["bf16_tflops"])
    ceilings = {"half precision": tensor, "three products (fp32 grade)": tensor / 3, "fp32": rates["fp32_tflops"]}
    intensities = [r["flop"] / r["bytes"] for r in records]
    low, high = min(intensities, default=1) / 4, max([*intensities, tensor / rates["copy_gbs"] * 1e3]) * 4
    bandwidth = rates["copy_gbs"] / 1e3
    for i, (label, rate) in enumerate(ceilings.items()):
        knee = rate / bandwidth
        axis.plot([low, knee, high], [low * bandwidth, rate, rate], color="black", linewidth=1.2 - 0.3 * i, alpha=0.8 - 0.2 * i)
        axis.annotate(f"{label}, {rate:.3g} TFLOP/s", (high, rate), ha="right", va="bottom", fontsize=7)
    axis.annotate(f"copy, {rates['copy_gbs']:.4g} GB/s", (low * 1.3, low * 1.3 * bandwidth), rotation=0, fontsize=7, va="top")
    seen = set()
    for record in records:
        colour, at = COLOURS[record["precision"]], record["flop"] / record["bytes"]
        chain = [p["tflops"] for p in record["peers"].values() if p["rel_error"] is not None]
        if chain:
            axis.scatter(at, max(chain), s=26, facecolors="none", edgecolors=colour)
        label = None if record["precision"] in seen else f"ours, {record['precision']}"
        seen.add(record["precision"])
        axis.scatter(at, record["ours"]["tflops"], s=48, color=colour, marker="D", label=label, zorder=3)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("FLOP per byte (every tensor moved once)")
    axis.set_ylabel("TFLOP/s")
    axis.legend(fontsize=7, frameon=False, loc="lower right", title="hollow: the fastest peer", title_fontsize=7)
    return _save(figure, folder, "roofline")


def sweep(cases: list[Record], folder: Path) -> str:
    """Every timed case of the sweep: speed-up over the fastest peer of equal or better accuracy over FLOP per byte; round a linear, square a convolution."""
    figure, axis = plt.subplots(figsize=(5.4, 4.0))
    for producer, marker in (("linear", "o"), ("conv2d", "s")):
        for precision in PRECISIONS:
            mine = [c for c in cases if c["precision"] == precision and (c["producer"] == "conv2d") == (producer == "conv2d") and c.get("speedup")]
            if mine:
                at = [c["flop"] / c["bytes"] for c in mine], [c["speedup"] for c in mine]
                label = f"{'convolution' if producer == 'conv2d' else 'GEMM'}, {precision}"
                axis.scatter(*at, s=24, marker=marker, alpha=0.8, label=label, facecolors=COLOURS[precision] if marker == "o" else "none", edgecolors=COLOURS[precision])
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("FLOP per byte (every tensor moved once)")
    axis.set_ylabel("times as fast as the fastest peer")
    if axis.collections:
        axis.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4)
    return _save(figure, folder, "sweep")
