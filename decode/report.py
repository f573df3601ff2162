"""A result for a person: tables, the split of the time, warnings; and two results side by side."""

from collections.abc import Sequence
from typing import Any

from hispec.decode.contestants import SWEEP
from hispec.decode.overlap import said
from hispec.decode.results import Row
from hispec.errors import DataError

# What has to agree for a ratio of two results to mean anything.
_SAME = ("prompt_sets", "max_new_tokens", "template")


def report(result: dict[str, Any]) -> str:
    """Everything: one block per prompt set and batch size."""
    machine, settings = result["machine"], result["settings"]
    lines = [
        f"{result['base']}, heads at {result['exits']}, up to {settings['max_new_tokens']} tokens, greedy,"
        f" {result['dtype']}, {result['threads']} threads, {machine['processor']}, load {machine['load_at_start']}",
        *result["left_out"],
        *said(result["overlap"], result["training"], {n: own["prompts"] for n, own in result["prompt_sets"].items()}),
        *(
            f"{own['passed_over']} prompts of {n} were too long and passed over"
            for n, own in result["prompt_sets"].items()
            if own["passed_over"]
        ),
    ]
    if not result["complete"]:
        lines.append("stopped early: what follows is what was finished")
    for rows in blocks(result):
        lines += ["", *block(rows)]
    if result["costs"] is not None:
        lines += ["", *costs(result["costs"])]
    return "\n".join(lines)


def blocks(result: dict[str, Any]) -> list[list[Row]]:
    """The rows of each prompt set and batch size, in order."""
    grouped: dict[tuple[str, int], list[Row]] = {}
    for row in result["rows"]:
        grouped.setdefault((row["prompt_set"], row["batch"]), []).append(row)
    return list(grouped.values())


def block(rows: Sequence[Row]) -> list[str]:
    """The lines of one prompt set at one batch size."""
    first = rows[0]
    title = "all prompt sets" if first["prompt_set"] == "all" else first["prompt_set"]
    n = first["identical_outputs"][1] // first["repeats"]
    table = [["", "tokens/s", "", "vs plain", "", "accepted", "tokens/full pass", "peak memory", "identical"]]
    table += [_line(row) for row in rows]
    lines = [f"{title}: {n} prompts, batch {first['batch']}, {first['repeats']} repeats", *_grid(table)]
    own = [row for row in rows if row["time_share"] and not is_sweep(row)]
    if any(row["acceptance"] for row in own):
        lines += ["accepted by position in the draft", *_grid([_positions(row) for row in own if row["acceptance"]])]
    lines += [line for row in own for line in _looked_up(row)]
    parts = sorted({part for row in own for part in row["time_share"]}, key=_part_order)
    shares = [[_percent(row["time_share"].get(part)) for part in parts] for row in own]
    named = [[f"  {row['contestant']}", *line] for row, line in zip(own, shares, strict=True)]
    return [*lines, "share of the time", *_grid([["", *parts], *named]), *warnings(rows)]


def is_sweep(row: Row) -> bool:
    """Whether a contestant is one of the sweep's."""
    return str(row["contestant"]).startswith(SWEEP)


def warnings(rows: Sequence[Row]) -> list[str]:
    """A line if speculation is slower than decoding plainly, with what to do."""
    slow = [row for row in rows if row["policy"] not in (None, "auto") and row["ratio_to_plain"] < 1.0]
    if not slow:
        return []
    named = ", ".join(f"{row['contestant']} {row['ratio_to_plain']:.2f}x" for row in slow)
    return [
        f"warning: slower than plain decoding: {named}. Decode with policy=auto, which finds out what pays, or train"
        " the heads on more text like this: drafts have to be accepted to pay"
    ]


def costs(found: dict[str, Any]) -> list[str]:
    """What passes cost, and what a contestant can come to by that."""
    passes = [["  plain", "", *(f"{ms:.1f}" for ms in found["plain_ms"])]]
    ratios = []
    for own in found["contestants"]:
        for part in own["levels"]:
            name, (start, stop) = f"  {own['contestant']}, {part['level']}", part["layers"]
            passes.append([name, f"{start}-{stop}", *(f"{ms:.1f}" for ms in part["ms"])])
        needed = [
            "out of reach" if it["acceptance"] is None else f"{it['acceptance']:.0%} (drafts of {it['drafts']})"
            for it in own["needed"]
        ]
        ratios.append([f"  {own['contestant']}", *(f"{ratio:.2f}x" for ratio in own["at_full_acceptance"]), *needed])
    targets = [f"{it['ratio']:.1f}x takes" for it in found["contestants"][0]["needed"]]
    return [
        f"what a pass costs here, in ms, by its rows (batch {found['batch']})",
        *_grid([["", "layers", *map(str, found["rows"])], *passes]),
        "what that allows: ratio to plain if every draft stood, by its length (with several exits, one full pass for"
        " 1, 2 or 4 drafts, as is best); and how much must be accepted, at every level, for a ratio",
        *_grid([["", *map(str, found["drafts"]), *targets], *ratios]),
    ]


def compare(before: dict[str, Any], after: dict[str, Any]) -> str:
    """The speed of two results row by row, and what else differs between them.

    Raises:
        DataError: they measured other prompts or settings, or have nothing in common.
    """
    one, two = _setting(before), _setting(after)
    for name in _SAME:
        if one[name] != two[name]:
            raise DataError(
                f"the results cannot be compared: {name} is {one[name]!r} in one, {two[name]!r} in the other"
            )
    lines = [f"differs: {name}: {one[name]} -> {two[name]}" for name in one if one[name] != two[name]]
    theirs = {_key(row): row for row in after["rows"]}
    pairs = [(row, theirs[_key(row)]) for row in before["rows"] if _key(row) in theirs]
    if not pairs:
        raise DataError("the results cannot be compared: no prompt set, contestant and batch size is in both")
    head = ["", "tokens/s", "", "ratio", "vs plain", "", "settings"]
    table = [head, *([*_both(a, b)] for a, b in pairs)]
    mine = {_key(row) for row in before["rows"]}
    for which, only in (("first", mine - set(theirs)), ("second", set(theirs) - mine)):
        lines += [f"in the {which} only: {' '.join(map(str, key))}" for key in sorted(only)]
    return "\n".join([*lines, *_grid(table)])


def _key(row: Row) -> tuple[str, str, int]:
    return row["prompt_set"], row["contestant"], row["batch"]


def _both(before: Row, after: Row) -> list[str]:
    speeds = before["tokens_per_s"], after["tokens_per_s"]
    ratios = before["ratio_to_plain"], after["ratio_to_plain"]
    ways = [
        f"{row['exits']} {row['policy']}{' and lookup' if row['lookup'] else ''}"
        for row in (before, after)
        if row["exits"] is not None
    ]
    return [
        f"{before['prompt_set']} {before['contestant']} batch {before['batch']}",
        *(f"{speed:.1f}" for speed in speeds),
        f"{speeds[1] / speeds[0]:.2f}x",
        *(f"{ratio:.2f}x" for ratio in ratios),
        " -> ".join(dict.fromkeys(ways)) or "-",
    ]


def _setting(result: dict[str, Any]) -> dict[str, Any]:
    versions: dict[str, Any] = result["versions"]
    sets = {name: own["sha256"][:12] for name, own in result["prompt_sets"].items()}
    own = {name: result["settings"][name] for name in ("max_new_tokens", "template", "turn", "repeats", "model")}
    alike = {name: result[name] for name in ("base", "exits", "dtype", "device", "threads", "complete")}
    machine = {name: result["machine"][name] for name in ("processor", "cores", "load_at_start")}
    return {"prompt_sets": sets} | own | alike | machine | versions


def _line(row: Row) -> list[str]:
    low, high = row["tokens_per_s_range"]
    quarters = row["ratio_quartiles"]
    per_pass, peak = row["tokens_per_full_pass"], row["peak_memory_bytes"]
    same, n = row["identical_outputs"]
    return [
        row["contestant"] + (f" {row['policy']}" if row["acceptance"] else ""),
        f"{row['tokens_per_s']:.1f}",
        f"({low:.1f}..{high:.1f})",
        f"{row['ratio_to_plain']:.2f}x",
        f"({quarters[0]:.2f}..{quarters[1]:.2f})",
        " ".join(_percent(share) for share in row["acceptance"] or ()) or "-",
        "-" if per_pass is None else f"{per_pass:.2f}",
        "not measured" if peak is None else f"{peak / 2**30:.2f} GiB",
        "yes" if row["identical"] else f"NO ({same} of {n})",
    ]


def _positions(row: Row) -> list[str]:
    ends = [*row["exits"][1:], "full"]
    parts = [
        f"at {end}: {' '.join(map(_percent, shares)) or '-'}"
        for end, shares in zip(ends, row["acceptance_by_position"], strict=True)
    ]
    return ["  " + row["contestant"], *parts]


def _looked_up(row: Row) -> list[str]:
    accepted, tokens = row["looked_up"] or (0, 0)
    return [f"looked up by {row['contestant']}: {tokens} tokens, {accepted / tokens:.0%} accepted"] if tokens else []


def _part_order(part: str) -> tuple[int, str]:
    return ["prompts", "draft", "intermediate", "full", "other"].index(part.split()[0]), part


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _grid(table: Sequence[Sequence[str]]) -> list[str]:
    """Columns under each other, the first to the left, the others to the right."""
    widths = [max((len(line[at]) for line in table if at < len(line)), default=0) for at in range(max(map(len, table)))]
    return [
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=False))
        ).rstrip()
        for line in table
    ]
