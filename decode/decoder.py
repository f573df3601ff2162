"""The decoder that people use: prompts in, completions out."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

from hispec.decode.blocks import BlockPool, blocks_for
from hispec.decode.cache import KVCache
from hispec.decode.engine import Engine, make_cache, make_levels
from hispec.decode.policy import parse_policy
from hispec.decode.request import Completion, SamplingParams
from hispec.decode.sequence import Sequence as Live
from hispec.decode.stats import LevelStats, Stats
from hispec.decode.text import TextStream
from hispec.errors import ConfigError, RequestError
from hispec.linear import prepack, unpack
from hispec.model import HiSpecModel

Prompt = str | list[int]


class Decoder:
    """Decodes with a model's heads, losslessly.

    Attributes:
        stats: counts of the last call.
    """

    def __init__(
        self,
        model: HiSpecModel,
        *,
        exits: Sequence[int] | None = None,
        policy: str = "fixed:2,4",
        max_batch: int = 8,
        kv_blocks: int | None = None,
    ) -> None:
        """`exits`: which of the model's exits to use, all by default; `()` is plain decoding.

        `policy`: `fixed:DRAFT,VERIFY`, draft length and how many survivors the full model waits for.
        `max_batch`: most sequences decoded at a time. `kv_blocks`: size of the KV pool in blocks of 16 tokens; by
        default what the largest `max_batch` requests of a call may need.

        Raises:
            ConfigError: an exit without a head, or a policy that makes no sense.
        """
        self.model = model
        heads = model.heads_list if exits is None else [self._head(exit_) for exit_ in exits]
        if [head.exit for head in heads] != sorted({head.exit for head in heads}):
            raise ConfigError(f"exits: {list(exits or ())} must rise and name each exit once")
        if max_batch < 1:
            raise ConfigError(f"max_batch: {max_batch} must be 1 or more")
        self.levels = make_levels(model.trunk, heads)
        self.policy = parse_policy(policy, len(self.levels))
        self.max_batch, self.kv_blocks = max_batch, kv_blocks
        self.stop_ids = _stop_ids(model)
        self.stats = Stats([LevelStats(level.stop) for level in self.levels])
        self._cache: KVCache | None = None
        self._pool = BlockPool(0)
        self._packed = prepack(model.heads)

    def close(self) -> None:
        """Give back what this decoder changed in the heads (the layout of their weights) and its memory."""
        unpack(self._packed)
        self._packed, self._cache, self._pool = [], None, BlockPool(0)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Continue every prompt (text, or token ids); completions come in the order of the prompts.

        Raises:
            RequestError: a prompt is empty or too long. CapacityError: the KV pool cannot hold it.
        """
        done = {c.index: c for c in self.generate_as_completed(prompts, params, progress=progress)}
        return [done[index] for index in sorted(done)]

    def generate_as_completed(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> Iterator[Completion]:
        """As `generate`, each completion as soon as it is finished; `index` tells whose it is."""
        with tqdm(total=self._count(prompts), desc="decode", unit="prompt", disable=None if progress else True) as bar:
            for sequence, _ in self._run(prompts, params, eager=False):
                bar.set_postfix_str(f"{self.stats.tokens_per_second:.0f} tokens/s", refresh=False)
                if sequence.finish_reason is not None:
                    bar.update()
                    yield _completion(sequence)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Continue one prompt, piece by piece: whole characters, never part of a stop string."""
        for sequence, _ in self._run(prompt, params, eager=True):
            if sequence.finish_reason is not None:
                sequence.text.finish()
            if piece := sequence.text.take(final=sequence.finish_reason is not None):
                yield piece

    def stream_ids(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[int]:
        """Continue one prompt, token id by token id, as they are committed."""
        for _, tokens in self._run(prompt, params, eager=False):
            yield from tokens

    def _run(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, eager: bool
    ) -> Iterator[tuple[Live, list[int]]]:
        sequences = self._sequences(prompts, params, eager)
        self._reserve(sequences)
        assert self._cache is not None
        engine = Engine(self.levels, self.policy, self._cache, self._pool, self.max_batch)
        for sequence in sequences:
            engine.add(sequence)
        self.stats = engine.stats
        start = time.perf_counter()
        for item in engine.run():
            self.stats.seconds = time.perf_counter() - start
            yield item

    def _sequences(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, eager: bool
    ) -> list[Live]:
        n = self._count(prompts)
        listed: Sequence[Any] = prompts if self._is_many(prompts) else [prompts]
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * n
        if len(each) != n:
            raise RequestError(f"{n} prompts but {len(each)} sampling parameters; give one for all, or one each")
        sequences = []
        for index, (prompt, own) in enumerate(zip(listed, each, strict=True)):
            ids = self.model.tokenizer(prompt).input_ids if isinstance(prompt, str) else list(prompt)
            self._check(index, ids, own)
            text = TextStream(self.model.tokenizer, own.stop, eager)
            trunk = self.model.trunk
            sequences.append(Live(index, ids, own, len(self.levels), trunk.vocab_size, self.stop_ids, text))
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

    def _reserve(self, sequences: list[Live]) -> None:
        """Make the pool large enough; a pool that is large enough is kept."""
        sizes = sorted((blocks_for(s.n_prompt + s.params.max_new_tokens) for s in sequences), reverse=True)
        wanted = self.kv_blocks or sum(sizes[: self.max_batch])
        if self._cache is None or self._pool.n_free < wanted:
            self._cache = make_cache(self.levels, wanted)
            self._pool = BlockPool(wanted)

    def _head(self, exit_: int) -> Any:
        for head in self.model.heads_list:
            if head.exit == exit_:
                return head
        raise ConfigError(f"exits: {exit_} has no head; this model has heads at {list(self.model.exits)}")

    @staticmethod
    def _is_many(prompts: Prompt | Sequence[Prompt]) -> bool:
        return not isinstance(prompts, str) and not (len(prompts) > 0 and all(isinstance(p, int) for p in prompts))

    def _count(self, prompts: Prompt | Sequence[Prompt]) -> int:
        return len(prompts) if self._is_many(prompts) else 1


def _completion(sequence: Live) -> Completion:
    assert sequence.finish_reason is not None
    ids = sequence.ids[sequence.n_prompt : sequence.n_committed]
    return Completion(
        sequence.index, sequence.ids[: sequence.n_prompt], ids, sequence.text.finish(), sequence.finish_reason
    )


def _stop_ids(model: HiSpecModel) -> frozenset[int]:
    """The model's stop tokens: all that its generation config names, else the tokenizer's one."""
    named = model.generation.eos_token_id
    if named is None:
        named = model.tokenizer.eos_token_id
    return frozenset([named] if isinstance(named, int) else named or [])
