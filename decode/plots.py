"""Pictures of a result: PNG files, and a page that holds them all and needs no network."""

import base64
import html
import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hispec.decode.report import blocks, is_sweep, report
from hispec.decode.results import Row, level_names
from hispec.errors import FileError

# Okabe and Ito's colours, which people who see few colours can tell apart; without the yellow, which white swallows.
# In every picture the same; contestants that are not named here take black, then those of whoever is not there.
_COLOURS = {
    "hf": "#999999", "hf_prompt_lookup": "#56B4E9", "hf_early_exit": "#E69F00", "plain": "#0072B2",
    "one_exit": "#009E73", "two_exits": "#D55E00", "auto": "#CC79A7",
}  # fmt: skip
_PARTS = {"prompts": "#999999", "draft": "#E69F00", "intermediate": "#56B4E9", "full": "#0072B2", "other": "#DDDDDD"}
_MARKERS = "osD^vP*X"
_DASHES = ["-", "--", ":", "-."]
_STYLE: Any = {"font.size": 15, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}
# Positions that were judged fewer times than this share of all tokens say little.
_SELDOM = 0.01


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write every picture that the result has data for, and report.html; returns the files.

    Raises:
        FileError: the folder cannot be written.
    """
    images = {name: _png(figure) for name, figure in figures(result).items()}
    files = {folder / f"{name}.png": data for name, data in images.items()}
    files[folder / "report.html"] = _page(result, images).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            path.write_bytes(content)
    except OSError as error:
        raise FileError(f"plots: cannot write to {folder}: {error.strerror}; choose another place") from None
    return list(files)


def figures(result: dict[str, Any]) -> dict[str, Figure]:
    """Every picture that the result has data for."""
    with rc_context(_STYLE):
        makers = (speed, acceptance, time_split, heat_map, batches)
        return {maker.__name__: figure for maker in makers if (figure := maker(result)) is not None}


def speed(result: dict[str, Any]) -> Figure | None:
    """Tokens per second by contestant, a panel for each prompt set; behind the bars the ratio to plain."""
    groups = [_without_sweep(rows) for rows in blocks(result) if rows[0]["batch"] == _smallest_batch(result)]
    n_columns = min(2, len(groups))
    n_rows = -(-len(groups) // n_columns)
    height = 1.3 + 0.5 * len(groups[0])
    figure = Figure(figsize=(3 + 4.6 * n_columns, 0.4 + n_rows * height), dpi=110, layout="constrained")
    panels = figure.subplots(n_rows, n_columns, sharex=True, sharey=True, squeeze=False).flat
    names = [row["contestant"] for row in groups[0]]
    for axes, rows in itertools.zip_longest(panels, groups):
        if rows is None:
            axes.set_axis_off()
            continue
        for y, row in enumerate(rows):
            low, high = row["tokens_per_s_range"]
            speed = row["tokens_per_s"]
            axes.barh(y, speed, 0.75, color=_colour(names, row["contestant"]),
                      xerr=[[speed - low], [high - speed]], ecolor="#444444")  # fmt: skip
            axes.annotate(f"{row['ratio_to_plain']:.2f}x", (high, y), (6, 0), textcoords="offset points", va="center")
        axes.set_title(f"{_title(rows[0])}, batch {rows[0]['batch']}", loc="left")
        axes.margins(x=0.22)
        axes.tick_params(labelbottom=True)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    figure.supxlabel("speed (tokens/s), ratio to plain;\nwhiskers: slowest and fastest repeat")
    return figure


def acceptance(result: dict[str, Any]) -> Figure | None:
    """Share of tokens that stood, by their position in what a level judged: one line per contestant and level."""
    rows = [row for row in _without_sweep(_main(result)) if row["acceptance"]]
    if not rows:
        return None
    names = [row["contestant"] for row in _without_sweep(_main(result))]
    figure, axes = _figure(10)
    longest = 1
    for row in rows:
        ends = [f"exit {e}" for e in row["exits"][1:]] + ["full model"]
        for level, (end, shares, judged) in enumerate(
            zip(ends, row["acceptance_by_position"], row["judged_by_position"], strict=True)
        ):
            shown = [share for share, n in zip(shares, judged, strict=True) if n >= _SELDOM * row["tokens"]]
            if not shown:
                continue
            longest = max(longest, len(shown))
            axes.plot(range(1, len(shown) + 1), [100 * share for share in shown],
                      _DASHES[(len(ends) - 1 - level) % len(_DASHES)], color=_colour(names, row["contestant"]),
                      marker=_MARKERS[level], markersize=9, linewidth=2.5,
                      label=f"{row['contestant']}, by {end}")  # fmt: skip
    if not axes.lines:
        return None
    axes.set_xticks(range(1, longest + 1))
    axes.set_xlim(0.7, longest + 0.3)
    axes.set_ylim(0, 103)
    axes.grid(axis="y", color="#DDDDDD")
    axes.set_xlabel("position in the draft (tokens)")
    axes.set_ylabel("accepted, if all before it were (%)")
    axes.set_title(f"Acceptance by position: {_title(rows[0])}, batch {rows[0]['batch']}", loc="left")
    _legend(axes)
    return figure


def time_split(result: dict[str, Any]) -> Figure | None:
    """Milliseconds per generated token, split by what they were spent on; Hugging Face's are whole."""
    rows = _without_sweep(_main(result))[::-1]
    figure, axes = _figure(10.5, 2.2 + 0.62 * len(rows))
    per_token = [1000 * row["seconds"] / row["tokens"] for row in rows]
    left = [0.0] * len(rows)
    parts = [
        "prompts",
        *dict.fromkeys(n for row in rows for n in level_names(len(row["acceptance"] or ()) + 1)),
        "other",
    ]
    parts = sorted(parts, key=lambda part: list(_PARTS).index(part.split()[0]))
    for part in parts:
        widths = [(row["time_share"] or {}).get(part, 0.0) * whole for row, whole in zip(rows, per_token, strict=True)]
        axes.barh(range(len(rows)), widths, 0.7, left=left, label=part, color=_PARTS[part.split()[0]],
                  edgecolor="white")  # fmt: skip
        left = [a + b for a, b in zip(left, widths, strict=True)]
    whole = [0.0 if row["time_share"] else ms for row, ms in zip(rows, per_token, strict=True)]
    if any(whole):
        axes.barh(range(len(rows)), whole, 0.7, label="not split", color="white", edgecolor="#666666", hatch="//")
    axes.set_yticks(range(len(rows)), [row["contestant"] for row in rows])
    axes.set_xlabel("time per generated token (ms)")
    axes.set_title(f"Where the time goes: {_title(rows[0])}, batch {rows[0]['batch']}", loc="left")
    _legend(axes)
    return figure


def heat_map(result: dict[str, Any]) -> Figure | None:
    """Ratio to plain over the exit that drafts and the exit that judges in between, or none."""
    rows = [row for row in _main(result) if is_sweep(row)]
    if not rows:
        return None
    exits = sorted({e for row in rows for e in row["exits"]})
    ratios = {tuple(row["exits"]): row["ratio_to_plain"] for row in rows}
    columns: list[tuple[int, ...]] = [(), *((e,) for e in exits[1:])]
    grid = [[ratios.get((draft, *judge), float("nan")) for judge in columns] for draft in exits]
    figure, axes = _figure(4.5 + 1.1 * len(columns), 2.6 + 0.8 * len(exits))
    reach = max(0.05, *(abs(ratio - 1) for ratio in ratios.values()))
    axes.set_facecolor("#EEEEEE")  # where there is nothing to measure
    image = axes.imshow(grid, cmap="PuOr_r", vmin=1 - reach, vmax=1 + reach, aspect="auto")
    for y, line in enumerate(grid):
        for x, ratio in enumerate(line):
            if ratio == ratio:
                colour = "white" if abs(ratio - 1) > 0.7 * reach else "black"
                axes.text(x, y, f"{ratio:.2f}", ha="center", va="center", color=colour)
    axes.set_xticks(range(len(columns)), ["none", *map(str, exits[1:])])
    axes.set_yticks(range(len(exits)), list(map(str, exits)))
    axes.set_xlabel("intermediate exit (layers)")
    axes.set_ylabel("draft exit (layers)")
    axes.set_title(f"Speed over exits, {rows[0]['policy']}:\n{_title(rows[0])}, batch {rows[0]['batch']}", loc="left")
    figure.colorbar(image, label="speed (ratio to plain)")
    return figure


def batches(result: dict[str, Any]) -> Figure | None:
    """Tokens per second over the batch size, one line per contestant."""
    sizes = sorted({row["batch"] for row in result["rows"]})
    if len(sizes) < 2:
        return None
    main = _main(result)[0]["prompt_set"]
    rows = [row for row in _without_sweep(result["rows"]) if row["prompt_set"] == main]
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    figure, axes = _figure(10)
    for number, name in enumerate(names):
        own = [row for row in rows if row["contestant"] == name]
        axes.plot([row["batch"] for row in own], [row["tokens_per_s"] for row in own], marker=_MARKERS[number % 8],
                  markersize=9, linewidth=2.5, color=_colour(names, name), label=name)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, list(map(str, sizes)))
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#DDDDDD")
    axes.set_xlabel("batch size (sequences)")
    axes.set_ylabel("speed, whole batch (tokens/s)")
    axes.set_title(f"Speed over batch size: {_title(rows[0])}", loc="left")
    _legend(axes)
    return figure


def _figure(width: float, height: float = 5.5) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    return figure, figure.add_subplot()


def _legend(axes: Axes) -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)


def _smallest_batch(result: dict[str, Any]) -> int:
    return min(int(row["batch"]) for row in result["rows"])


def _main(result: dict[str, Any]) -> list[Row]:
    """The rows of all prompts together, at the smallest batch."""
    return [rows for rows in blocks(result) if rows[0]["batch"] == _smallest_batch(result)][-1]


def _without_sweep(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if not is_sweep(row)]


def _title(row: Row) -> str:
    return "all prompts" if row["prompt_set"] == "all" else str(row["prompt_set"])


def _colour(names: Sequence[str], name: str) -> str:
    if name in _COLOURS:
        return _COLOURS[name]
    free = ["#000000", *(colour for known, colour in _COLOURS.items() if known not in names)]
    return free[[other for other in names if other not in _COLOURS].index(name) % len(free)]


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _page(result: dict[str, Any], images: dict[str, bytes]) -> str:
    pictures = "\n".join(
        f'<img alt="{name}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'
        for name, data in images.items()
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>hispec-bench: {html.escape(result["base"])}</title>
<style>body {{ font-family: sans-serif; max-width: 75em; margin: 2em auto }} img {{ max-width: 100%; display: block;
margin: 1em 0 }} pre {{ overflow-x: auto; font-size: 85% }}</style></head>
<body><h1>hispec-bench</h1>
<pre>{html.escape(report(result))}</pre>
{pictures}
</body></html>
"""
