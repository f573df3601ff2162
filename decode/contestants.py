"""Ways to decode that are measured against each other: ours, by exits and policy; Hugging Face's are in hf.py."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hispec.decode.bench_options import DEFAULT_CONTESTANTS, BenchOptions, ContestantOptions
from hispec.errors import ConfigError

if TYPE_CHECKING:
    from hispec.decode.decoder import Decoder
    from hispec.model import HiSpecModel

# Prompts and most new tokens in, new tokens out.
Run = Callable[[list[list[int]], int], list[list[int]]]
# Exits that a contestant needs because of its name, and takes from the shallowest on.
_N_EXITS = {"plain": 0, "plain_lookup": 0, "one_exit": 1, "two_exits": 2, "two_exits_lookup": 2}
_LOOKUP = {"plain_lookup", "two_exits_lookup"}
SWEEP = "sweep "
HF = {"hf", "hf_prompt_lookup", "hf_early_exit"}


@dataclass(frozen=True)
class Contestant:
    """One way to decode.

    Attributes:
        exits, policy: how, if it is one of ours. decoder: what counts its passes and verdicts.
    """

    name: str
    run: Run
    exits: tuple[int, ...] | None = None
    policy: str | None = None
    decoder: "Decoder | None" = None

    def close(self) -> None:
        """Give back what it holds."""
        if self.decoder is not None:
            self.decoder.close()


def wanted(options: BenchOptions, exits: Sequence[int]) -> tuple[dict[str, ContestantOptions], list[str]]:
    """Who takes part, with exits and policy filled in; and a line for each who cannot, with the reason.

    Raises:
        ConfigError: a contestant of one's own asks for exits that have no head.
    """
    named = options.contestants or {name: ContestantOptions() for name in DEFAULT_CONTESTANTS}
    if "plain" not in named:
        named = {"plain": ContestantOptions(), **named}
    taking_part: dict[str, ContestantOptions] = {}
    left_out: list[str] = []
    for name, own in named.items():
        if name in HF:
            taking_part[name] = own
            continue
        need = 0 if name == "auto" else _N_EXITS.get(name, 1)
        if own.exits is None and len(exits) < need:
            left_out.append(f"{name} is left out: it needs {need} exits with heads, this model has {list(exits)}")
            continue
        taking_part[name] = _filled(name, own, exits)
    if options.sweep is not None:
        for chosen in sorted(
            [(e,) for e in options.sweep.exits] + list(itertools.combinations(options.sweep.exits, 2))
        ):
            own = ContestantOptions(exits=list(chosen), policy=options.sweep.policy)
            taking_part[SWEEP + ",".join(map(str, chosen))] = _filled("sweep", own, exits)
    return taking_part, left_out


def hierarchies(contestants: Mapping[str, ContestantOptions]) -> dict[str, list[int]]:
    """The exits of those that have some, each choice of exits once; those of the sweep left out."""
    chosen: dict[tuple[int, ...], str] = {}
    for name, own in contestants.items():
        if name not in HF and own.exits and not name.startswith(SWEEP):
            chosen.setdefault(tuple(own.exits), name)
    return {name: list(exits) for exits, name in chosen.items()}


def _filled(name: str, own: ContestantOptions, exits: Sequence[int]) -> ContestantOptions:
    used = list(exits[: _N_EXITS.get(name, len(exits))]) if own.exits is None else own.exits
    if bad := [e for e in used if e not in exits]:
        raise ConfigError(f"contestants: {name} wants exit {bad[0]}, which has no head; this model has {list(exits)}")
    policy = own.policy or ("auto" if name == "auto" else "fixed:1" if len(used) < 2 else "fixed:1,1")
    lookup = True if own.lookup is None and name in _LOOKUP else own.lookup
    return ContestantOptions(exits=used, policy=policy, lookup=lookup, tokens=own.tokens)


def ours(model: "HiSpecModel", name: str, own: ContestantOptions, batch: int, kv_blocks: int) -> Contestant:
    """A contestant of this engine; `kv_blocks`: what the largest batch needs, so that the pool never grows.

    Raises:
        ConfigError: a policy or exits that make no sense.
    """
    from hispec.decode.decoder import Decoder
    from hispec.decode.request import SamplingParams

    assert own.exits is not None and own.policy is not None
    # Nobody is to profit from prompts that begin alike.
    decoder = Decoder(
        model,
        exits=own.exits,
        policy=own.policy,
        lookup=own.lookup,
        max_batch=batch,
        kv_blocks=kv_blocks,
        prefix_cache=False,
    )

    def run(prompts: list[list[int]], n: int) -> list[list[int]]:
        return [done.ids for done in decoder.generate(prompts, SamplingParams(max_new_tokens=n))]

    return Contestant(name, run, tuple(own.exits), own.policy, decoder)
