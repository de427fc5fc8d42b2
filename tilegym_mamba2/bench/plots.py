"""Plots of benchmark rows: speed-up over sequence length, speed-up on model layers, roofline, bandwidth."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from .measure import KINDS, Row, headline_us, speed_up
from .passes import CHUNK_OP, SCAN_OP, STEP_OP
from .report import SUBJECT, groups, kind_name

# Okabe and Ito's colours: told apart with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
IMAGE_SUFFIXES = (".png", ".svg", ".pdf")
_FAMILY = ("batch_size", "num_heads", "head_size", "num_groups", "dtype", "decay")
# Of the scan: a sweep over T is of one layer.
_OPTIONS = ("gated", "raw_dt", "d_per_row", "num_sequences", "padded", "stateless")
# What stands in file names and titles; the forward and its backward, which came first, have no word.
_OP_WORDS = {CHUNK_OP: "", SCAN_OP: "scan", STEP_OP: "step"}


def write(
    rows: Iterable[Row], target: Path, *, subject: str = SUBJECT, kinds: Sequence[str] = KINDS
) -> list[Path]:
    """Write every plot that the rows allow; returns the files. The times are the first of `kinds` there is.

    `target` with an image suffix names the first plot, and the others get a word added to its name; any
    other `target` is a folder.

    Raises:
        ValueError: when no row has a time.
    """
    found = [group for group in groups(rows) if any(headline_us(row, kinds) for row in group)]
    if not found:
        raise ValueError("no row has a time: nothing to plot")
    one_file = target.suffix.lower() in IMAGE_SUFFIXES
    folder, stem, suffix = (target.parent, target.stem, target.suffix) if one_file else (target, "", ".png")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for op, pass_name in dict.fromkeys((_op(group), group[0]["pass"]) for group in found):
        chosen = [group for group in found if (_op(group), group[0]["pass"]) == (op, pass_name)]
        for word, build in _BUILDERS[op]:
            figure = build(chosen, subject, kinds)
            if figure is None:
                continue
            words = [word, *filter(None, [_OP_WORDS[op]])]
            words += [] if pass_name == "forward" else [pass_name.replace("+", "-")]
            words += [] if kinds == KINDS else [kinds[0].removesuffix("_us")]
            if one_file:
                words = ([] if not written else words) if stem else words
                name = "-".join([stem, *words])
            else:
                name = "-".join(words)
            path = folder / f"{name}{suffix}"
            figure.savefig(path, dpi=150)
            plt.close(figure)
            written.append(path)
    return written


def _op(group: Sequence[Row]) -> str:
    return group[0].get("op", CHUNK_OP)


def _what(group: Sequence[Row]) -> str:
    """The op and pass in a title."""
    word = _OP_WORDS[_op(group)]
    return "step" if word == "step" else f"{word} {group[0]['pass']}".strip()


def _times(group: Sequence[Row], subject: str) -> Row | None:
    return next((r for r in group if r["backend"] == subject and r["status"] == "ok"), None)


def _peers(found: Sequence[Sequence[Row]], subject: str, kinds: Sequence[str]) -> list[str]:
    """Peers with at least one speed-up."""
    names = dict.fromkeys(row["backend"] for group in found for row in group if row["backend"] != subject)
    return [n for n in names if any(_ratio(group, subject, n, kinds) for group in found)]


def _ratio(group: Sequence[Row], subject: str, peer: str, kinds: Sequence[str]) -> float | None:
    ours = _times(group, subject)
    row = next((r for r in group if r["backend"] == peer), None)
    return speed_up(ours, row, kinds) if ours is not None and row is not None else None


def _family(group: Sequence[Row]) -> tuple:
    fields = group[0]["fields"]
    return (*(fields.get(name) for name in _FAMILY), *(fields.get(name) or 0 for name in _OPTIONS))


def _sweep(found: Sequence[Sequence[Row]]) -> tuple[tuple, list[Sequence[Row]]] | None:
    """The family of specs (same B, H, P, G, dtype, decay) with most sequence lengths, three at least.

    Models measured at two lengths are layers, and no curve.
    """
    families: dict[tuple, list[Sequence[Row]]] = {}
    for group in found:
        families.setdefault(_family(group), []).append(group)

    def lengths(groups_: Sequence[Sequence[Row]]) -> int:
        return len({group[0]["fields"]["num_tokens"] for group in groups_})

    family = max(families, key=lambda f: (lengths(families[f]), len(families[f])))
    return (family, families[family]) if lengths(families[family]) > 2 else None


def _tokens(value: int) -> str:
    return f"{value // 1024}K" if value % 1024 == 0 and value >= 1024 else str(value)


def _device(found: Sequence[Sequence[Row]]) -> str:
    env: Mapping[str, Any] = found[-1][0]["env"]
    return f"{env.get('device')}, {str(env.get('date'))[:10]}"


def _short(found: Sequence[Sequence[Row]], kinds: Sequence[str]) -> str:
    return f"{kind_name(found, kinds)} medians, same run"


def speed_up_figure(
    found: Sequence[Sequence[Row]], subject: str = SUBJECT, kinds: Sequence[str] = KINDS
) -> Figure | None:
    """A panel per peer: speed-up over T, a line per N. None when no family of specs sweeps T."""
    sweep = _sweep(found)
    peers = _peers(sweep[1], subject, kinds) if sweep else []
    if not sweep or not peers:
        return None
    family, members = sweep
    states = sorted({g[0]["fields"]["state_size"] for g in members})
    lengths = sorted({g[0]["fields"]["num_tokens"] for g in members})
    figure, axes = plt.subplots(
        1, len(peers), figsize=(1.5 + 4.6 * len(peers), 4.3), sharey=True, squeeze=False, layout="constrained"
    )
    highest = 1.0
    for axis, peer in zip(axes[0], peers, strict=True):
        for i, state in enumerate(states):
            points = {
                g[0]["fields"]["num_tokens"]: _ratio(g, subject, peer, kinds)
                for g in members
                if g[0]["fields"]["state_size"] == state
            }
            points = {t: y for t, y in sorted(points.items()) if y}
            if not points:
                continue
            highest = max(highest, *points.values())
            style = {"color": COLOURS[i % 6], "marker": MARKERS[i % 6], "label": f"N = {state}"}
            axis.plot(list(points), list(points.values()), linewidth=1.8, markersize=6, **style)
        axis.axhline(1.0, color="0.35", linewidth=1.0, linestyle="--")
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [_tokens(t) for t in lengths])
        axis.minorticks_off()
        axis.set_xlabel("tokens T")
        axis.set_title(f"against {peer}")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(f"times faster ({subject})")
    axes[0][0].set_ylim(0, 1.12 * highest)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=len(labels))
    sizes = dict(zip(_FAMILY, family, strict=False))
    shape = (
        f"B {sizes['batch_size']}, H {sizes['num_heads']}, P {sizes['head_size']}, G {sizes['num_groups']}"
    )
    figure.suptitle(
        f"Mamba-2 {_what(members[0])}, {shape}, {sizes['dtype']}\n{_short(found, kinds)}; {_device(found)}",
        fontsize=10,
    )
    return figure


def layers_figure(
    found: Sequence[Sequence[Row]], subject: str = SUBJECT, kinds: Sequence[str] = KINDS
) -> Figure | None:
    """A bar per peer for every spec outside the sweep over T. None when there is none."""
    sweep = _sweep(found)
    in_sweep = {id(g) for g in sweep[1]} if sweep else set()
    rest = [g for g in found if id(g) not in in_sweep]
    peers = _peers(rest, subject, kinds) if rest else []
    rest = [g for g in rest if any(_ratio(g, subject, p, kinds) for p in peers)]
    if not rest:
        return None
    figure, axis = plt.subplots(
        figsize=(8.0, 1.6 + len(rest) * (0.16 + 0.22 * len(peers))), layout="constrained"
    )
    height = 0.8 / len(peers)
    highest = 1.0
    for i, peer in enumerate(peers):
        label: str | None = f"against {peer}"
        for y, group in enumerate(rest):
            ratio = _ratio(group, subject, peer, kinds)
            if ratio is None:
                continue
            highest = max(highest, ratio)
            at = y + (i - (len(peers) - 1) / 2) * height
            axis.barh(at, ratio, height=0.9 * height, color=COLOURS[i % 6], label=label)
            label = None
            axis.text(ratio, at, f" {ratio:.2f}×", va="center", fontsize=8)
    axis.axvline(1.0, color="0.35", linewidth=1.0, linestyle="--")
    axis.set_yticks(range(len(rest)), [g[0]["spec"] for g in rest])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.15 * highest)
    axis.set_xlabel(f"times faster ({subject})")
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    axis.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(peers))
    figure.suptitle(f"Mamba-2 {_what(rest[0])}\n{_short(found, kinds)}; {_device(found)}", fontsize=10)
    return figure


def roofline_figure(
    found: Sequence[Sequence[Row]], subject: str = SUBJECT, kinds: Sequence[str] = KINDS
) -> Figure | None:
    """Achieved TFLOP/s over operations per byte, under the two measured ceilings. None without rates.

    Rates are those of the device alone: there is none for other kinds of time.
    """
    if kinds != KINDS:
        return None
    rows = [r for g in found for r in g if r["status"] in ("ok", "unchecked") and r.get("ceilings")]
    if not rows:
        return None
    copy = max(r["ceilings"]["copy_gbs"] for r in rows)
    matrix = max(r["ceilings"]["matrix_tflops"] for r in rows)
    intensities = [r["flops"] / r["bytes"] for r in rows]
    low, high = min(intensities) / 2, max(max(intensities), matrix * 1e3 / copy) * 2
    figure, axis = plt.subplots(figsize=(7.6, 5.0), layout="constrained")
    ridge = matrix * 1e3 / copy
    axis.plot([low, ridge, high], [low * copy / 1e3, matrix, matrix], color="0.2", linewidth=1.6)
    _label_roofs(axis, low, ridge, high, copy, matrix)
    names = list(dict.fromkeys(r["backend"] for r in rows))
    names.sort(key=lambda n: n != subject)
    for i, name in enumerate(names):
        own = [r for r in rows if r["backend"] == name]
        axis.scatter(
            [r["flops"] / r["bytes"] for r in own],
            [r["tflops"] for r in own],
            color=COLOURS[i % 6],
            marker=MARKERS[i % 6],
            s=34,
            alpha=0.85,
            label=name,
            zorder=3,
        )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(low, high)
    axis.set_ylim(min(min(r["tflops"] for r in rows), low * copy / 1e3) / 1.6, matrix * 1.8)
    axis.set_xlabel("operations per byte (inputs read once, outputs written once)")
    axis.set_ylabel("TFLOP/s (operations at the spec's chunk size)")
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        scale.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        scale.set_minor_locator(NullLocator())
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, loc="lower right")
    figure.suptitle(
        f"Roofline, Mamba-2 {_what(found[0])}\n{_short(found, kinds)}; {_device(found)}", fontsize=10
    )
    return figure


def _label_roofs(axis: Axes, low: float, ridge: float, high: float, copy: float, matrix: float) -> None:
    text = {"fontsize": 8, "color": "0.2"}
    rate = f"{copy / 1e3:.2f} TB/s" if copy >= 1e3 else f"{copy:.1f} GB/s"
    start = low * 1.05
    axis.annotate(
        f"copy {rate}",
        (start, start * copy / 1e3),
        xytext=(6, -2),
        textcoords="offset points",
        va="top",
        **text,
    )
    axis.annotate(
        f"matrix product {matrix:.3g} TFLOP/s",
        (high, matrix),
        xytext=(-4, 4),
        textcoords="offset points",
        ha="right",
        **text,
    )


def bandwidth_figure(
    found: Sequence[Sequence[Row]], subject: str = SUBJECT, kinds: Sequence[str] = KINDS
) -> Figure | None:
    """A bar per backend for every spec: GB/s beside the measured copy. None without rates, as a roofline."""
    groups_ = [[r for r in g if r["status"] in ("ok", "unchecked") and r.get("ceilings")] for g in found]
    groups_ = [g for g in groups_ if g]
    if kinds != KINDS or not groups_:
        return None
    names = list(dict.fromkeys(r["backend"] for g in groups_ for r in g))
    names.sort(key=lambda n: n != subject)
    copy = max(r["ceilings"]["copy_gbs"] for g in groups_ for r in g)
    figure, axis = plt.subplots(
        figsize=(8.0, 1.6 + len(groups_) * (0.16 + 0.22 * len(names))), layout="constrained"
    )
    height = 0.8 / len(names)
    labelled: set[str] = set()
    for y, group in enumerate(groups_):
        for row in group:
            i = names.index(row["backend"])
            at = y + (i - (len(names) - 1) / 2) * height
            label = None if row["backend"] in labelled else row["backend"]
            labelled.add(row["backend"])
            axis.barh(at, row["gbs"], height=0.9 * height, color=COLOURS[i % 6], label=label)
            share = row["gbs"] / row["ceilings"]["copy_gbs"]
            axis.text(row["gbs"], at, f" {share:.0%}", va="center", fontsize=8)
    axis.axvline(copy, color="0.35", linewidth=1.0, linestyle="--", label="copy")
    axis.set_yticks(range(len(groups_)), [g[0]["spec"] for g in groups_])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.15 * max(copy, *(r["gbs"] for g in groups_ for r in g)))
    axis.set_xlabel("GB/s (inputs and states read once, outputs and states written once)")
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    axis.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(names) + 1)
    figure.suptitle(f"Mamba-2 {_what(found[0])}\n{_short(found, kinds)}; {_device(found)}", fontsize=10)
    return figure


_LINES = (("speedup", speed_up_figure), ("layers", layers_figure), ("roofline", roofline_figure))
# A step is all memory: a ceiling of matrix products says nothing of it.
_BUILDERS = {
    CHUNK_OP: _LINES,
    SCAN_OP: _LINES,
    STEP_OP: (("layers", layers_figure), ("bandwidth", bandwidth_figure)),
}
