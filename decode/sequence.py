"""One request while it is being decoded.

    ids        p p p p p p c c c t t t d d        p prompt, c committed, t tentative, d draft
    counts[0]  --------------------------|        tokens that have been through level 0 (its layers and its head's)
    counts[1]  --------------------|              ... through level 1
    counts[2]  --------------|                    ... through the last level: all before it is committed,
                                                  and so is the one token that the last level chose after it

Rolling back is setting counters and cutting `ids`: KV slots beyond them are written over.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hispec.decode.lookup import MOST, NOTHING, Found, Lookup
from hispec.decode.request import LOOKED_UP, FinishReason, SamplingParams
from hispec.decode.sampler import Sampler
from hispec.decode.text import TextStream
from hispec.decode.verify import Verdict, agree

if TYPE_CHECKING:
    from hispec.decode.level import Level


class Sequence:
    """Token ids, one counter per level, and the hidden states that wait between levels.

    Attributes:
        index, choice: which request it belongs to, and which of the request's `n` continuations it is.
        n_remembered, serial: leading blocks that the pool remembers, and the serial number of the last of them.
        goal: counts to reach by catching up, before the policy decides what runs: the prompt's length in every level,
            or what had been reached when the sequence was preempted. None once reached.
        chosen_by: per token after the prompt, the level whose choice it is, LOOKED_UP if no level's; all above it that
            have judged let it stand.
        fresh: committed tokens that nobody has fetched yet.
        looked_up: tokens found in the text itself that stand behind the committed ones until the last level judges.
        levels: the hierarchy it goes through. sure: by position, what the draft head gave a token it drafted.
        error: why it failed, if it did.
    """

    def __init__(
        self,
        index: int,
        prompt: list[int],
        params: SamplingParams,
        n_levels: int,
        vocab_size: int,
        model_stop_ids: Iterable[int],
        text: TextStream,
        choice: int = 0,
    ) -> None:
        self.index, self.choice, self.params, self.text = index, choice, params, text
        self.ids = list(prompt)
        self.n_prompt = self.n_committed = len(prompt)
        self.chosen_by: list[int] = []
        self.start_over(n_levels)
        self.table: list[int] = []
        self.n_remembered = self.serial = 0
        self.stop_ids = frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else frozenset(model_stop_ids))
        self.lookup, self.looked_up = Lookup(), NOTHING
        self.sampler = Sampler(params, choice, self.n_prompt, vocab_size, self.stop_ids)
        self.fresh: list[int] = []
        self.levels: list[Level] = []
        self.sure: dict[int, float] = {}
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None

    def start_over(self, n_levels: int) -> None:
        """Go through a hierarchy of `n_levels`, from the first token on."""
        self.counts = [0] * n_levels
        self.goal: list[int] | None = [self.n_prompt] * n_levels
        # hidden[k], [n, D]: states after level k's layers of the tokens [counts[k + 1], counts[k]).
        self.hidden: list[Tensor | None] = [None] * n_levels

    def change_levels(self, n_levels: int) -> None:
        """Go on in a hierarchy of `n_levels`, at a moment when all levels have passed the same tokens."""
        assert len(set(self.counts)) == 1 and self.goal is None
        self.counts, self.hidden = [self.counts[0]] * n_levels, [None] * n_levels

    @property
    def prefilling(self) -> bool:
        """Whether no token has been decided yet."""
        return len(self.ids) == self.n_prompt

    @property
    def ended(self) -> bool:
        """Whether what is known, committed or not, already ends; then nothing more is drafted."""
        if len(self.ids) - self.n_prompt >= self.params.max_new_tokens:
            return True
        return not self.stop_ids.isdisjoint(self.ids[self.n_committed :])

    def pending(self, level: int) -> tuple[int, int]:
        """The tokens [start, stop) that wait for `level`."""
        stop = len(self.ids) if level == 0 else self.counts[level - 1]
        return self.counts[level], stop if self.goal is None else min(stop, self.goal[level])

    def waiting(self, level: int, n: int) -> Tensor:
        """The hidden states [n, D] that the first `n` tokens of `pending(level)` enter the level with."""
        hidden_nD = self.hidden[level - 1]
        assert hidden_nD is not None, f"nothing waits for level {level}"
        return hidden_nD[:n]

    def passed(self, level: int, stop: int, hidden_nD: Tensor) -> None:
        """Record that all tokens before `stop` have been through `level`; `hidden_nD` came out of it."""
        if level > 0:
            held = self.hidden[level - 1]
            assert held is not None
            left = held[stop - self.counts[level] :]
            self.hidden[level - 1] = left if len(left) else None
        self.counts[level] = stop
        if level < len(self.counts) - 1:
            held = self.hidden[level]
            self.hidden[level] = hidden_nD if held is None else torch.cat([held, hidden_nD])
        if self.counts == self.goal:
            self.goal = None

    def judge(self, level: int, first: int, picks: list[int], logits_RV: Tensor, vocab_ids: Tensor | None) -> Verdict:
        """Let `level` accept or replace the tokens after position `first`, and add one where none is known.

        One row per position from `first` on: `picks` are the tokens that the sampler took from `logits_RV`.
        """
        proposed = self.ids[first + 1 : first + 1 + len(logits_RV)]
        if self.sampler.picks_tokens:
            verdict = agree(picks, proposed)
        else:
            drawn = not self.looked_up.tokens
            verdict = self.sampler.reject(first, self.ids, logits_RV, vocab_ids, proposed, drawn)
        if verdict.token is not None:
            self._cut(first + 1 + verdict.accepted)
            self.ids.append(verdict.token)
            self.chosen_by.append(self.levels[level].index)
        if level == len(self.counts) - 1:
            self.sampler.note(logits_RV, self.ids[first + 1 : first + 1 + len(logits_RV)])
        return verdict

    def propose(self, tokens: list[int]) -> int:
        """Add drafts of level 0, up to where the text would end or a number is missing (-1).

        Returns how many of the passes that made them, and of the last draft's own pass, are of use.
        """
        for number, token in enumerate(tokens, 1):
            if token < 0:
                return number
            self.ids.append(token)
            self.chosen_by.append(0)
            if self.ended:
                return number
        return len(tokens) + 1

    def find(self) -> Found:
        """What the text offers as drafts, up to where it would end, at a moment when all of it is committed."""
        # The last level adds one token of its own.
        room = self.params.max_new_tokens - (len(self.ids) - self.n_prompt) - 1
        if room < 1:
            return NOTHING
        matched, tokens = self.lookup.find(self.ids, min(MOST, room))
        end = next((n for n, token in enumerate(tokens, 1) if token in self.stop_ids), len(tokens))
        return Found(matched, tokens[:end])

    def look_up(self, n: int) -> None:
        """Take the first `n` tokens of what `find` offers as drafts."""
        matched, tokens = self.find()
        self.looked_up = Found(matched, tokens[:n])
        self.ids += tokens[:n]
        self.chosen_by += [LOOKED_UP] * n

    def commit(self) -> None:
        """Move the tokens that the last level has newly decided to `fresh`, up to where the text ends."""
        while self.n_committed <= self.counts[-1] and self.finish_reason is None:
            token = self.ids[self.n_committed]
            self.fresh.append(token)
            self.n_committed += 1
            if self.text.push(token) or token in self.stop_ids:
                self.finish_reason = "stop"
            elif self.n_committed - self.n_prompt >= self.params.max_new_tokens:
                self.finish_reason = "length"
        self.sampler.forget(self.n_committed)
        for position in [p for p in self.sure if p < self.n_committed]:
            del self.sure[position]

    def preempt(self) -> None:
        """Give up what the KV pool holds, but no token: all that was decided stays, and its layers are run again."""
        if self.goal is None:
            self.goal = self.counts
        self.counts = [0] * len(self.counts)
        self.hidden = [None] * len(self.hidden)
        self.table, self.n_remembered, self.serial = [], 0, 0

    def _cut(self, keep: int) -> None:
        """Forget all tokens from `keep` on, in every level."""
        if keep == len(self.ids):
            return
        del self.ids[keep:]
        del self.chosen_by[keep - self.n_prompt :]
        self.counts = [min(count, keep) for count in self.counts]
        for level, hidden_nD in enumerate(self.hidden):
            if hidden_nD is not None:
                n = self.counts[level] - self.counts[level + 1]
                self.hidden[level] = hidden_nD[:n] if n else None
