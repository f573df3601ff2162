"""The pictures of a report, as SVG: curves over steps, and what was let stand by position."""

import io
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from hispec.card import often_judged

Line = dict[str, Any]

# Okabe and Ito's colours, which people who see few colours can tell apart; the full model is black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
FULL_MODEL = "#000000"
MARKERS, DASHES = "os^Dv*", ("-", "--", "-.", ":")
STYLE: Any = {"font.size": 13, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "hispec"}
# Points that a curve is drawn with; of more steps, neighbours are drawn as their mean.
POINTS = 300


def colour(level: int, n_exits: int) -> str:
    """Of a level, the same in all pictures and in the text."""
    return FULL_MODEL if level == n_exits else COLOURS[level % len(COLOURS)]


def training(lines: Sequence[Line], name: str, label: str) -> str:
    """One of the heads' metrics over steps: while training, and (marked) on held-out prompts where that is measured."""
    steps = [line for line in lines if "heads" in line]
    evaluated = [line for line in lines if "eval" in line]
    figure, axes = _figure()
    n_means = max(1, len(steps) // POINTS)
    for place, row in enumerate(steps[0]["heads"] if steps else []):
        shade = colour(place, len(steps[0]["heads"]))
        axes.plot(
            _means([line["step"] for line in steps], n_means),
            _means([line["heads"][place][name] for line in steps], n_means),
            color=shade, linestyle=DASHES[place % len(DASHES)], linewidth=1.8, label=f"exit {row['exit']}",
        )  # fmt: skip
        if evaluated and name in evaluated[0]["eval"]["exits"][place]:
            axes.plot(
                [line["step"] for line in evaluated], [line["eval"]["exits"][place][name] for line in evaluated],
                color=shade, linestyle="none", clip_on=False, zorder=3, label=f"exit {row['exit']}, held out",
                **_marker(place),
            )  # fmt: skip
    axes.set_xlabel("optimizer steps" + (f" (means of {n_means})" if n_means > 1 else ""))
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0, top=None if name == "loss" else 1)
    if name == "top1":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return _svg(figure, axes)


def decoding(lines: Sequence[Line]) -> str | None:
    """Tokens per full pass over steps, simulated and decoded; None before there are two points."""
    evaluated = [line for line in lines if "eval" in line]
    if len({line["step"] for line in evaluated}) < 2:
        return None
    figure, axes = _figure()
    steps = [line["step"] for line in evaluated]
    simulated, decoded = (
        [line["eval"][f"{name}_tokens_per_full_pass"] for line in evaluated] for name in ("simulated", "measured")
    )
    # One inside the other, since they ought to be the same.
    axes.plot(steps, simulated, "s--", color="#777777", markersize=13, markerfacecolor="none", label="simulated")
    axes.plot(steps, decoded, "o-", color=FULL_MODEL, markersize=6, linewidth=1.4, label="decoded")
    axes.set_ylim(0.9, 1.05 * max(*simulated, *decoded))
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("tokens per full pass")
    return _svg(figure, axes)


def positions(judges: Sequence[dict[str, Any]]) -> str | None:
    """Share of drafted tokens that each judge let stand, by position; None where nothing was judged."""
    if not any(judge["judged_at"] for judge in judges):
        return None
    figure, axes = _figure()
    for place, judge in enumerate(judges, 1):
        shares = often_judged(judge)
        axes.plot(
            range(1, len(shares) + 1), shares, color=colour(place, len(judges)), linestyle=DASHES[place % len(DASHES)],
            linewidth=1.8, clip_on=False, **_marker(place),
            label=f"judged by {'the ' if place == len(judges) else ''}{judge['judge']}",
        )  # fmt: skip
    axes.set_ylim(-0.05, 1)  # a mark at 0 is not to lie on the numbers below
    axes.set_xlim(left=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("position in what was judged (tokens)")
    axes.set_ylabel("stood, if all before it did")
    return _svg(figure, axes)


def styled() -> AbstractContextManager[Any]:
    """While entered, pictures look alike."""
    return rc_context(STYLE)


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(axis="y", color="#DDDDDD")
    axes.set_axisbelow(True)
    return figure, axes


def _marker(place: int) -> dict[str, Any]:
    """The first one small, those after it larger and hollow: what lies on one spot is seen."""
    return {"marker": MARKERS[place % len(MARKERS)], "markersize": 6 + 4 * place, "markeredgewidth": 1.8} | (
        {"markerfacecolor": "none"} if place else {}
    )


def _means(values: Sequence[float], n: int) -> list[float]:
    """Means of `n` neighbours each."""
    return [float(np.mean(values[at : at + n])) for at in range(0, len(values), n)]


def _svg(figure: Figure, axes: Axes) -> str:
    # Below the picture, where no curve can be in its way.
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return buffer.getvalue()
