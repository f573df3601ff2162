"""A run of hispec-bench: the same prompts through every contestant, turn by turn."""

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from hispec.decode import machine, overlap
from hispec.decode.bench_options import BenchOptions
from hispec.decode.blocks import blocks_for
from hispec.decode.ceiling import ceilings
from hispec.decode.contestants import HF, Contestant, hierarchies, ours, wanted
from hispec.decode.hf import HuggingFace
from hispec.decode.prompt_sets import Prompts, load_prompts
from hispec.decode.prompts import chat_ids
from hispec.decode.results import Measurement, Turn, make_rows
from hispec.errors import ConfigError, DataError
from hispec.model import HiSpecModel

# Enough to touch all that is needed; what comes out is thrown away.
_WARM_TOKENS = 8


class Task(NamedTuple):
    """What every contestant decodes before the next task's turn."""

    prompt_set: str
    repeat: int
    first: int
    """Who begins: one place on from prompt to prompt and from repeat to repeat."""
    prompts: list[list[int]]


class Drawn(NamedTuple):
    """The prompts of a set that are measured on."""

    texts: list[str]
    ids: list[list[int]]
    where: str
    passed_over: int = 0
    """Prompts drawn that were too long."""

    def about(self) -> dict[str, Any]:
        """What identifies them."""
        digest = hashlib.sha256(json.dumps(self.ids).encode()).hexdigest()
        return {"source": self.where, "prompts": len(self.ids), "passed_over": self.passed_over, "sha256": digest}


class Bench:
    """A run.

    Attributes:
        turns: what is finished. left_out: who could not take part, and why. costs: what passes cost, once measured.
    """

    def __init__(self, options: BenchOptions) -> None:
        """Load prompts and model.

        Raises:
            HiSpecError: whatever is wrong with what was asked, before anything is measured.
        """
        named = {"held_out": None} if options.prompts is None else options.prompts
        sets = [load_prompts(name, place, options.seed) for name, place in named.items()]
        self.options = options
        self.model = _load(options)
        self.about = machine.describe(self.model.trunk.device)
        self.drawn = {own.name: self._draw(own) for own in sets}
        self.contestants, self.left_out = wanted(options, self.model.exits)
        texts = {name: drawn.texts for name, drawn in self.drawn.items()}
        self.overlap = overlap.find(options.training, texts) if options.training else {}
        self.turns: list[Turn] = []
        self.costs: dict[str, Any] | None = None
        self.complete = False

    def run(self) -> None:
        """Measure everything, one batch size after the other."""
        tasks = {batch: self._tasks(batch) for batch in self.options.batches}
        n_turns = sum(map(len, tasks.values()))
        library = HuggingFace(self.model) if HF & set(self.contestants) else None
        exits = hierarchies(self.contestants) if self.options.costs else {}
        with tqdm(total=n_turns, desc="bench", unit="turn", disable=None) as bar:
            for batch, own in tasks.items():
                with self._group(batch, library) as group:
                    if batch == 1 and exits:
                        self.costs = ceilings(self.model, exits)
                    for contestant in group:
                        contestant.run(own[0].prompts, min(_WARM_TOKENS, self.options.max_new_tokens))
                    for task in own:
                        by = {}
                        for contestant in group[task.first % len(group) :] + group[: task.first % len(group)]:
                            bar.set_postfix_str(f"{task.prompt_set}, batch {batch}, {contestant.name}")
                            by[contestant.name] = self._measured(contestant, task.prompts)
                        self.turns.append(Turn(task.prompt_set, batch, task.repeat, by))
                        bar.update()
        self.complete = True

    def result(self) -> dict[str, Any]:
        """What is finished, as it is written."""
        model, options = self.model, self.options
        ways = {n: (own.exits, own.policy, own.lookup) for n, own in self.contestants.items() if n not in HF}
        return {
            "format": 2,
            "complete": self.complete,
            "rows": make_rows(self.turns, list(self.contestants), ways),
            "costs": self.costs,
            "base": model.base,
            "exits": list(model.exits),
            "dtype": str(model.trunk.dtype).removeprefix("torch."),
            "device": str(model.trunk.device),
            "seed": options.seed,
            "settings": options.model_dump(exclude={"output", "plots"}),
            "prompt_sets": {name: drawn.about() for name, drawn in self.drawn.items()},
            "training": options.training,
            "overlap": self.overlap,
            "left_out": self.left_out,
            **self.about,
        }

    def _draw(self, own: Prompts) -> Drawn:
        """As many prompts as are wanted, of those that are short enough."""
        options, tokenizer = self.options, self.model.tokenizer
        room = self.model.trunk.max_positions - options.max_new_tokens
        limit = min(room, options.max_prompt_tokens or room)
        drawn = Drawn([], [], own.where)
        for at, text in enumerate(own.texts):
            asked = own.asked(text)
            if options.template and tokenizer.chat_template is not None:
                ids = chat_ids(tokenizer, [{"role": "user", "content": asked}])
            else:
                ids = list(tokenizer(asked).input_ids)
            if 0 < len(ids) <= limit:
                drawn.texts.append(text)
                drawn.ids.append(ids)
            if len(drawn.ids) == options.max_prompts:
                return drawn._replace(passed_over=at + 1 - len(drawn.ids))
        if not drawn.ids:
            raise DataError(f"prompts.{own.name}: none of {len(own.texts)} prompts has {limit} tokens or fewer")
        return drawn._replace(passed_over=len(own.texts) - len(drawn.ids))

    def _tasks(self, batch: int) -> list[Task]:
        size = self.options.turn or batch
        return [
            Task(name, repeat, number + repeat, prompts[at : at + size])
            for repeat in range(self.options.repeats)
            for name, (_, prompts, *_) in self.drawn.items()
            for number, at in enumerate(range(0, len(prompts), size))
        ]

    @contextmanager
    def _group(self, batch: int, library: HuggingFace | None) -> Iterator[list[Contestant]]:
        """The contestants at one batch size."""
        longest = max(len(ids) for drawn in self.drawn.values() for ids in drawn.ids)
        kv_blocks = batch * blocks_for(longest + self.options.max_new_tokens)
        group: list[Contestant] = []
        try:
            for name, own in self.contestants.items():
                made = (
                    library.contestant(name, own, batch)
                    if library is not None and name in HF
                    else ours(self.model, name, own, batch, kv_blocks)
                )
                if isinstance(made, Contestant):
                    group.append(made)
                else:
                    self.left_out.append(made)
            yield group
        finally:
            for contestant in group:
                contestant.close()

    def _measured(self, contestant: Contestant, prompts: list[list[int]]) -> Measurement:
        device = self.model.trunk.device
        machine.forget_peak(device)
        start = time.perf_counter()
        outputs = contestant.run(prompts, self.options.max_new_tokens)
        seconds = time.perf_counter() - start
        stats = None if contestant.decoder is None else contestant.decoder.stats
        return Measurement(seconds, outputs, stats, machine.peak_bytes(device))


def _load(options: BenchOptions) -> HiSpecModel:
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError):
        raise ConfigError(f"device: {options.device!r} is not available here; legal: cpu, cuda, cuda:N") from None
    dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
    if options.heads == "trained":
        return HiSpecModel.from_pretrained(options.model, dtype=dtype, device=options.device)
    if options.heads == "shared" and not options.exits:
        raise ConfigError("heads=shared needs the exits to read at, such as exits=[4,8]")
    return HiSpecModel.from_base(
        options.model, options.exits if options.heads == "shared" else (), dtype=dtype, device=options.device
    )
