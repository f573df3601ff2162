"""The decoder that people use: prompts in, completions out."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from hispec import ranks
from hispec.decode.auto import AutoPolicy
from hispec.decode.blocks import BlockPool, blocks_for
from hispec.decode.cache import block_bytes, blocks_that_fit
from hispec.decode.compiled import compile_layers, uncompile
from hispec.decode.costs import costs_of
from hispec.decode.engine import Engine
from hispec.decode.hierarchy import make_cache, make_hierarchies, make_levels, stored
from hispec.decode.policy import Policy, parse_policy
from hispec.decode.request import Completion, SamplingParams
from hispec.decode.runner import make_runner
from hispec.decode.sequence import Sequence as Live
from hispec.decode.stats import Stats
from hispec.decode.text import TextStream
from hispec.errors import ConfigError, DivergedError, RequestError
from hispec.linear import prepack, unpack
from hispec.model import HiSpecModel

Prompt = str | list[int]


@dataclass(frozen=True)
class Update:
    """What a step brought for one continuation: new tokens, new text (whole characters, never part of a stop string),
    and all of it once it has finished."""

    index: int
    choice: int
    ids: list[int]
    text: str
    completion: Completion | None


class Decoder:
    """Decodes with a model's heads, losslessly.

    A list of prompts goes to `generate`, one prompt to `stream`. Whoever serves requests that come and go takes them in
    with `add` and calls `step` as long as there are any.

    Attributes:
        stats: counts of the last call of a method that takes prompts.
    """

    def __init__(
        self,
        model: HiSpecModel,
        *,
        exits: Sequence[int] | None = None,
        policy: str = "auto",
        lookup: bool | None = None,
        max_batch: int = 8,
        kv_blocks: int | None = None,
        prefill_chunk: int = 512,
        prefix_cache: bool = True,
        exact: bool = False,
        graphs: bool = True,
        compile: bool = False,
        gpu_memory_utilization: float = 0.9,
    ) -> None:
        """`exits`: which of the model's exits to use, all by default; `()` is plain decoding.

        `policy`: `fixed:DRAFT,VERIFY`, draft length and how many survivors the full model waits for; behind `:now`, a
        sequence does not wait for the others of its batch. `auto` chooses by what passes cost on this machine and by
        what is accepted; what it has learned serves the next call too.
        `lookup`: what followed the last few tokens earlier in the same text is proposed too; null: where `auto` finds
        that it pays. True with a fixed policy: wherever there is something, before anything is drafted.
        `max_batch`: most sequences decoded at a time. `kv_blocks`: size of the KV pool in blocks of 16 tokens; by
        default what the largest `max_batch` requests of a call may need. A pool that is too small for that is shared
        out as far as it goes, and the youngest requests wait or run again later.
        `prefill_chunk`: longer prompts go through the model in pieces, between which the others go on.
        `prefix_cache`: what a prompt has in common with an earlier one does not run again.
        `exact`: bitwise the same numbers whatever batch, drafts and policy, also in bf16; slower.
        `graphs`, `compile`: on a GPU, record short passes as CUDA graphs; compile each layer with torch.compile.
        `gpu_memory_utilization`: how much of a GPU's memory may be taken; what is free of it is the KV pool, unless
        `kv_blocks` says how large that is.

        Raises:
            ConfigError: an exit without a head, a policy that makes no sense, or `compile` on a CPU.
        """
        self.model = model
        heads = model.heads_list if exits is None else [self._head(exit_) for exit_ in exits]
        if [head.exit for head in heads] != sorted({head.exit for head in heads}):
            raise ConfigError(f"exits: {list(exits or ())} must rise and name each exit once")
        for name, value in (("max_batch", max_batch), ("prefill_chunk", prefill_chunk)):
            if value < 1:
                raise ConfigError(f"{name}: {value} must be 1 or more")
        if not 0.0 < gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization: {gpu_memory_utilization} must be above 0 and at most 1")
        if compile and model.trunk.device.type == "cpu":
            # torch.compile does not take prepacked weights, and what it fuses saves less than those do.
            raise ConfigError("compile: the model is on a CPU, where compiled layers are no faster; leave it out")
        self.levels = make_levels(model.trunk, heads)
        fixed = None if policy == "auto" else parse_policy(policy, len(self.levels))
        self.max_batch, self.kv_blocks = max_batch, kv_blocks
        self.prefill_chunk, self.prefix_cache = prefill_chunk, prefix_cache
        self.stop_ids = _stop_ids(model)
        self.lookup = policy == "auto" if lookup is None else lookup
        self._requests: dict[int, list[Live]] = {}
        self._n_requests = 0
        self.exact, self.graphs = exact, graphs
        self.gpu_memory_utilization = gpu_memory_utilization
        self._packed = prepack(model.heads)
        layers = [module for level in self.levels for _, module in level.placed]
        self._compiled = compile_layers(layers) if compile else []
        # Costs are measured of the heads as they will run.
        self.policy: Policy = fixed or self._auto()
        self._engine = self._new_engine(0)

    @property
    def stats(self) -> Stats:
        return self._engine.stats

    @property
    def requests(self) -> list[int]:
        """Numbers of the requests that `add` took in and that have not finished."""
        return list(self._requests)

    def close(self) -> None:
        """Give back what this decoder changed in the heads (the layout of their weights) and its memory."""
        unpack(self._packed)
        uncompile(self._compiled)
        self._packed, self._compiled, self._engine = [], [], self._new_engine(0)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Continue every prompt (text, or token ids); completions come in the order of the prompts, `n` of each.

        Raises:
            RequestError: a prompt is empty or too long. CapacityError: the KV pool cannot hold it.
        """
        done = self.generate_as_completed(prompts, params, progress=progress)
        return sorted(done, key=lambda completion: (completion.index, completion.choice))

    def generate_as_completed(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> Iterator[Completion]:
        """As `generate`, each completion as soon as it is finished; `index` and `choice` tell whose it is."""
        sequences = self._sequences(prompts, params)
        with tqdm(total=len(sequences), desc="decode", unit="text", disable=None if progress else True) as bar:
            for sequence, _ in self._run(sequences):
                bar.set_postfix_str(f"{self.stats.tokens_per_second:.0f} tokens/s", refresh=False)
                if sequence.finish_reason is not None:
                    bar.update()
                    yield _completion(sequence)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Continue one prompt, piece by piece: whole characters, never part of a stop string.

        Raises:
            DivergedError: the model's logits are not finite.
        """
        for sequence, _ in self._run(self._single(prompt, params, eager=True)):
            if sequence.error is not None:
                raise DivergedError(sequence.error)
            final = sequence.finish_reason is not None
            if final:
                sequence.text.finish()
            if piece := sequence.text.take(final):
                yield piece

    def stream_ids(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[int]:
        """Continue one prompt, token id by token id, as they are committed.

        Raises:
            DivergedError: the model's logits are not finite.
        """
        for sequence, tokens in self._run(self._single(prompt, params, eager=False)):
            yield from tokens
            if sequence.error is not None:
                raise DivergedError(sequence.error)

    def add(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Take a request in, to be decoded by calls of `step` together with those that are there; returns its number.

        Raises:
            RequestError: the prompt is empty or too long. CapacityError: the KV pool could never hold it.
        """
        sequences = self._choices(self._n_requests, prompt, params or SamplingParams(), eager=True)
        self._reserve(sequences)
        for sequence in sequences:
            self._engine.add(sequence)
        self._requests[self._n_requests] = sequences
        self._n_requests += 1
        return self._n_requests - 1

    def step(self) -> list[Update]:
        """Run one level for the requests that were added; returns what is new. A finished request is forgotten."""
        self._engine.step()
        updates = []
        for number, sequences in list(self._requests.items()):
            for sequence in [s for s in sequences if s.fresh or s.finish_reason is not None]:
                fresh, sequence.fresh = sequence.fresh, []
                done = None if sequence.finish_reason is None else _completion(sequence)
                piece = sequence.text.take(final=done is not None)
                updates.append(Update(number, sequence.choice, fresh, piece, done))
                if done is not None:
                    sequences.remove(sequence)
            if not sequences:
                del self._requests[number]
        return updates

    def cancel(self, number: int) -> None:
        """End a request; the next `step` tells what it had got to, with finish reason abort."""
        for sequence in self._requests.get(number, []):
            self._engine.cancel(sequence)

    def _run(self, sequences: list[Live]) -> Iterator[tuple[Live, list[int]]]:
        """Decode these to their end; yields each with its new tokens. Whoever stops listening cancels what is left."""
        self._reserve(sequences)
        if not self._engine.busy:
            self._engine.count_anew()
        try:
            for sequence in sequences:
                self._engine.add(sequence)
            waiting = sequences
            while waiting:
                if not any(sequence.fresh for sequence in waiting):
                    self._engine.step()
                for sequence in waiting:
                    if sequence.fresh or sequence.finish_reason is not None:
                        fresh, sequence.fresh = sequence.fresh, []
                        yield sequence, fresh
                # A caller may have gone on with other calls meanwhile, and these with them.
                waiting = [sequence for sequence in waiting if sequence.finish_reason is None or sequence.fresh]
        finally:
            for sequence in sequences:
                self._engine.cancel(sequence)

    def _sequences(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Live]:
        is_many = not isinstance(prompts, str) and not (len(prompts) > 0 and all(isinstance(p, int) for p in prompts))
        listed: Sequence[Any] = prompts if is_many else [prompts]
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(listed)
        if len(each) != len(listed):
            raise RequestError(
                f"{len(listed)} prompts but {len(each)} sampling parameters; give one for all, or one each"
            )
        numbered = enumerate(zip(listed, each, strict=True))
        return [live for index, (prompt, own) in numbered for live in self._choices(index, prompt, own, False)]

    def _single(self, prompt: Prompt, params: SamplingParams | None, eager: bool) -> list[Live]:
        if params is not None and params.n > 1:
            raise RequestError(f"n={params.n} continuations cannot be streamed one after another; use generate")
        return self._choices(0, prompt, params or SamplingParams(), eager)

    def _choices(self, index: int, prompt: Prompt, params: SamplingParams, eager: bool) -> list[Live]:
        """The sequences of one request."""
        ids = self.model.tokenizer(prompt).input_ids if isinstance(prompt, str) else list(prompt)
        self._check(index, ids, params)
        vocab_size, tokenizer = self.model.trunk.vocab_size, self.model.tokenizer
        sequences = []
        for choice in range(params.n):
            text = TextStream(tokenizer, params.stop, eager, params.min_new_tokens)
            sequences.append(Live(index, ids, params, len(self.levels), vocab_size, self.stop_ids, text, choice))
        return sequences

    def _check(self, index: int, ids: list[int], params: SamplingParams) -> None:
        trunk = self.model.trunk
        if not ids:
            raise RequestError(f"prompt {index} is empty: it has no token to start from; give at least one")
        if bad := [token for token in ids if not 0 <= token < trunk.vocab_size]:
            raise RequestError(f"prompt {index}: token id {bad[0]} is not in the vocabulary, 0..{trunk.vocab_size - 1}")
        if len(ids) + params.max_new_tokens > trunk.max_positions:
            raise RequestError(
                f"prompt {index}: {len(ids)} tokens and max_new_tokens={params.max_new_tokens} exceed the model's"
                f" {trunk.max_positions} positions; shorten the prompt or lower max_new_tokens"
            )
        if bad := [token for token in params.logit_bias if not 0 <= token < trunk.vocab_size]:
            raise RequestError(
                f"prompt {index}: logit_bias names token {bad[0]}, the vocabulary is 0..{trunk.vocab_size - 1}"
            )

    def _reserve(self, sequences: list[Live]) -> None:
        """Make the pool large enough, unless somebody is using it; one that is large enough is kept."""
        if self._engine.busy:
            return
        if self.kv_blocks is None and self.model.trunk.device.type == "cuda":
            if self._engine.pool.n_blocks == 0:
                block = block_bytes(stored(self.levels), self.model.trunk.dtype)
                free, total = torch.cuda.mem_get_info(self.model.trunk.device)
                fit = blocks_that_fit(free, total, self.gpu_memory_utilization, block)
                # Ranks that decode as one must have pools of one size, or they would not admit alike.
                self._engine = self._new_engine(ranks.share(fit) if ranks.joined() else fit)
            return
        sizes = sorted((blocks_for(s.n_prompt + s.params.max_new_tokens) for s in sequences), reverse=True)
        wanted = self.kv_blocks or sum(sizes[: self.max_batch])
        if self._engine.pool.n_blocks < wanted:
            self._engine = self._new_engine(wanted)

    def _new_engine(self, n_blocks: int) -> Engine:
        cache, pool = make_cache(self.levels, n_blocks), BlockPool(n_blocks, self.prefix_cache)
        runner = make_runner(cache, self.model.trunk, graphs=self.graphs, exact=self.exact)
        return Engine(self.levels, self.policy, cache, pool, self.max_batch, self.prefill_chunk, runner, self.lookup)

    def _auto(self) -> AutoPolicy:
        hierarchies = make_hierarchies(self.levels)
        different = {level.number: level for levels in hierarchies.values() for level in levels}
        costs = costs_of(
            list(different.values()),
            functools.partial(make_cache, self.levels),
            self.max_batch,
            repr((self.model.trunk.model.config.to_json_string(), [head.config for head in self.model.heads_list])),
        )
        measured = {row["exit"]: row["top1"] for row in self.model.metrics.get("exits", [])}
        return AutoPolicy(hierarchies, costs, measured)

    def _head(self, exit_: int) -> Any:
        for head in self.model.heads_list:
            if head.exit == exit_:
                return head
        raise ConfigError(f"exits: {exit_} has no head; this model has heads at {list(self.model.exits)}")


def _completion(sequence: Live) -> Completion:
    assert sequence.finish_reason is not None
    ids = sequence.ids[sequence.n_prompt : sequence.n_committed]
    return Completion(
        index=sequence.index,
        choice=sequence.choice,
        prompt_ids=sequence.ids[: sequence.n_prompt],
        ids=ids,
        text=sequence.text.finish(),
        finish_reason=sequence.finish_reason,
        logprobs=None if sequence.params.logprobs is None else sequence.sampler.logprobs[: len(ids)],
        error=sequence.error,
        chosen_by=sequence.chosen_by[: len(ids)],
    )


def _stop_ids(model: HiSpecModel) -> frozenset[int]:
    """The model's stop tokens: all that its generation config names, else the tokenizer's one."""
    named = model.generation.eos_token_id
    if named is None:
        named = model.tokenizer.eos_token_id
    return frozenset([named] if isinstance(named, int) else named or [])
