"""What was measured, turn by turn, and the rows that are made of it."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hispec.decode.stats import Stats
from hispec.errors import DataError, FileError

Row = dict[str, Any]
Way = tuple[list[int] | None, str | None, bool | None]
# What only our engine counts.
_COUNTED = (
    "acceptance", "acceptance_by_position", "judged_by_position", "looked_up", "tokens_per_full_pass", "time_share",
)  # fmt: skip


@dataclass(frozen=True)
class Measurement:
    """One contestant's turn. `stats`: what our engine counted; Hugging Face's tells nothing."""

    seconds: float
    outputs: list[list[int]]
    stats: Stats | None
    peak_bytes: int | None

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Turn:
    """The same prompts through every contestant, one after the other."""

    prompt_set: str
    batch: int
    repeat: int
    by: dict[str, Measurement]


def make_rows(turns: Sequence[Turn], names: Sequence[str], ways: Mapping[str, Way]) -> list[Row]:
    """A row per batch size, prompt set and contestant; several sets have rows `all` too.

    `names`: contestants in the order of the table. `ways`: exits, policy and lookup of ours.
    """
    rows = []
    for batch in dict.fromkeys(turn.batch for turn in turns):
        mine = [turn for turn in turns if turn.batch == batch]
        sets = list(dict.fromkeys(turn.prompt_set for turn in mine))
        for prompt_set in [*sets, *(["all"] if len(sets) > 1 else [])]:
            own = [turn for turn in mine if prompt_set in ("all", turn.prompt_set)]
            rows += [
                _row(name, prompt_set, own, ways.get(name, (None, None, None))) for name in names if name in own[0].by
            ]
    return rows


def _row(name: str, prompt_set: str, turns: Sequence[Turn], way: Way) -> Row:
    """A contestant's figures over these turns."""
    own = [turn.by[name] for turn in turns]
    plain = [turn.by["plain"] for turn in turns]
    repeats: dict[int, list[Measurement]] = {}
    for turn in turns:
        repeats.setdefault(turn.repeat, []).append(turn.by[name])
    speeds = [sum(m.tokens for m in ms) / sum(m.seconds for m in ms) for ms in repeats.values()]
    ratios = [mine.speed / theirs.speed for mine, theirs in zip(own, plain, strict=True)]
    pairs = [pair for m, p in zip(own, plain, strict=True) for pair in zip(m.outputs, p.outputs, strict=True)]
    same = sum(mine == theirs for mine, theirs in pairs)
    peaks = [m.peak_bytes for m in own if m.peak_bytes is not None]
    return {
        "prompt_set": prompt_set,
        "contestant": name,
        "batch": turns[0].batch,
        "exits": way[0],
        "policy": way[1],
        "lookup": way[2],
        "tokens_per_s": statistics.median(speeds),
        "tokens_per_s_range": [min(speeds), max(speeds)],
        "ratio_to_plain": statistics.median(ratios),
        "ratio_quartiles": _quartiles(ratios),
        "ratio_per_turn": ratios,
        "identical": same == len(pairs),
        "identical_outputs": [same, len(pairs)],
        **_counted([m.stats for m in own if m.stats is not None], sum(m.seconds for m in own)),
        "tokens": sum(m.tokens for m in own),
        "seconds": sum(m.seconds for m in own),
        "repeats": len(repeats),
        "peak_memory_bytes": max(peaks, default=None),
    }


def _counted(stats: Sequence[Stats], seconds: float) -> Row:
    """Acceptance, tokens looked up (those that stood, all), tokens per full pass and where the time went; of `seconds`,
    what no level had is `other`."""
    if not stats:
        return dict.fromkeys(_COUNTED)
    levels = list(zip(*(s.levels for s in stats), strict=True))
    judging = levels[1:]
    judged = [_summed([level.judged_at for level in of]) for of in judging]
    accepted = [_summed([level.accepted_at for level in of]) for of in judging]
    verdicts = sum(s.verdicts for s in stats)
    times = {"prompts": sum(s.prompt_seconds for s in stats)}
    times |= {
        name: sum(level.seconds for level in of) for name, of in zip(level_names(len(levels)), levels, strict=True)
    }
    times["other"] = seconds - sum(times.values())
    return {
        # Nobody judges where nobody drafts.
        "acceptance": [sum(a) / sum(j) if sum(j) else None for a, j in zip(accepted, judged, strict=True)] or None,
        "acceptance_by_position": [
            [a / j for a, j in zip(a_at, j_at, strict=True)] for a_at, j_at in zip(accepted, judged, strict=True)
        ],
        "judged_by_position": judged,
        "looked_up": [sum(s.looked_up_accepted for s in stats), sum(s.looked_up for s in stats)],
        "tokens_per_full_pass": sum(s.verified for s in stats) / verdicts if verdicts else None,
        "time_share": {name: own / seconds for name, own in times.items()},
    }


def level_names(n: int) -> list[str]:
    """What `n` levels do, from the shallowest on."""
    if n == 1:
        return ["full"]
    middle = ["intermediate"] if n == 3 else [f"intermediate {k}" for k in range(1, n - 1)]
    return ["draft", *middle, "full"]


def _summed(counts: Sequence[list[int]]) -> list[int]:
    length = max(map(len, counts), default=0)
    return [sum(own[at] for own in counts if at < len(own)) for at in range(length)]


def _quartiles(values: Sequence[float]) -> list[float]:
    if len(values) < 2:
        return [values[0], values[0]]
    quarters = statistics.quantiles(values, n=4, method="inclusive")
    return [quarters[0], quarters[2]]


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write under a temporary name, then rename.

    Raises:
        FileError: the place cannot be written.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(data, indent=2) + "\n")
        temporary.replace(path)
    except OSError as error:
        raise FileError(f"output: cannot write {path}: {error.strerror}; choose another place") from None


def read_json(path: Path) -> dict[str, Any]:
    """A result that `write_json` wrote.

    Raises:
        FileError: not readable. DataError: not a result.
    """
    try:
        data = json.loads(path.read_text())
        if "results" in data:
            raise DataError(f"{path} was written by an earlier version of hispec-bench; measure again")
        if not isinstance(data["rows"], list) or not data["rows"]:
            raise KeyError("rows")
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} is not a result of hispec-bench; give the file that output=FILE wrote") from None
    result: dict[str, Any] = data
    return result
