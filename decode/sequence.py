"""One request while it is being decoded.

    ids        p p p p p p c c c t t t d d        p prompt, c committed, t tentative, d draft
    counts[0]  --------------------------|        tokens that have been through level 0 (its layers and its head's)
    counts[1]  --------------------|              ... through level 1
    counts[2]  --------------|                    ... through the last level: all before it is committed,
                                                  and so is the one token that the last level chose after it

Rolling back is setting counters and cutting `ids`: KV slots beyond them are written over.
"""

import secrets
from collections.abc import Iterable

import torch
from torch import Tensor

from hispec.decode.request import FinishReason, SamplingParams
from hispec.decode.sampling import gumbel, processed
from hispec.decode.text import TextStream
from hispec.decode.verify import Verdict, agree, reject


class Sequence:
    """Token ids, one counter per level, and the hidden states that wait between levels."""

    def __init__(
        self,
        index: int,
        prompt: list[int],
        params: SamplingParams,
        n_levels: int,
        vocab_size: int,
        model_stop_ids: Iterable[int],
        text: TextStream,
    ) -> None:
        self.index, self.params, self.vocab_size, self.text = index, params, vocab_size, text
        self.ids = list(prompt)
        self.n_prompt = self.n_committed = len(prompt)
        self.counts = [0] * n_levels
        # hidden[k], [n, D]: states after level k's layers of the tokens [counts[k + 1], counts[k]).
        self.hidden: list[Tensor | None] = [None] * n_levels
        self.table: list[int] = []
        self.stop_ids = frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else frozenset(model_stop_ids))
        self.finish_reason: FinishReason | None = None
        self.seed = secrets.randbits(62) if params.seed is None else params.seed
        self.generator = torch.Generator().manual_seed(self.seed % (1 << 63))
        # What tokens need until they are committed: their noise (coupled), the law they are drawn from (rejection).
        self._noise: dict[int, Tensor] = {}
        self._laws: dict[int, Tensor] = {}

    @property
    def prefilling(self) -> bool:
        """Whether the prompt has not been through all levels yet."""
        return self.counts[-1] < self.n_prompt

    @property
    def ended(self) -> bool:
        """Whether what is known, committed or not, already ends; then nothing more is drafted."""
        if len(self.ids) - self.n_prompt >= self.params.max_new_tokens:
            return True
        return not self.stop_ids.isdisjoint(self.ids[self.n_committed :])

    def pending(self, level: int) -> tuple[int, int]:
        """The tokens [start, stop) that wait for `level`."""
        return self.counts[level], len(self.ids) if level == 0 else self.counts[level - 1]

    def waiting(self, level: int) -> Tensor:
        """The hidden states [n, D] that `pending(level)` enters the level with."""
        hidden_nD = self.hidden[level - 1]
        assert hidden_nD is not None, f"nothing waits for level {level}"
        return hidden_nD

    def passed(self, level: int, stop: int, hidden_nD: Tensor) -> None:
        """Record that all tokens before `stop` have been through `level`; `hidden_nD` came out of it."""
        if level > 0:
            self.hidden[level - 1] = None
        self.counts[level] = stop
        if level < len(self.counts) - 1:
            held = self.hidden[level]
            self.hidden[level] = hidden_nD if held is None else torch.cat([held, hidden_nD])

    def judge(
        self, level: int, first: int, picks: list[int], logits_RV: Tensor | None, vocab_ids: Tensor | None
    ) -> Verdict:
        """Let `level` accept or replace the tokens after position `first`, and add one where none is known.

        One row per position from `first` on: `picks` are their arg-max tokens; `logits_RV` is given when sampling.
        """
        proposed = self.ids[first + 1 : first + 1 + len(picks)]
        if logits_RV is None:
            verdict = agree(picks, proposed)
        elif self.params.rule == "coupled":
            verdict = agree(self._coupled(first, logits_RV, vocab_ids), proposed)
        else:
            verdict = self._rejection(first, logits_RV, vocab_ids, proposed)
        if verdict.token is not None:
            self._cut(first + 1 + verdict.accepted)
            self.ids.append(verdict.token)
        return verdict

    def commit(self) -> list[int]:
        """The tokens that the last level has newly decided, up to where the text ends."""
        new: list[int] = []
        while self.n_committed <= self.counts[-1] and self.finish_reason is None:
            token = self.ids[self.n_committed]
            new.append(token)
            self.n_committed += 1
            if self.text.push(token) or token in self.stop_ids:
                self.finish_reason = "stop"
            elif self.n_committed - self.n_prompt >= self.params.max_new_tokens:
                self.finish_reason = "length"
        for kept in (self._noise, self._laws):
            for position in [p for p in kept if p < self.n_committed]:
                del kept[position]
        return new

    def _cut(self, keep: int) -> None:
        """Forget all tokens from `keep` on, in every level."""
        if keep == len(self.ids):
            return
        del self.ids[keep:]
        self.counts = [min(count, keep) for count in self.counts]
        for level, hidden_nD in enumerate(self.hidden):
            if hidden_nD is not None:
                n = self.counts[level] - self.counts[level + 1]
                self.hidden[level] = hidden_nD[:n] if n else None

    def _coupled(self, first: int, logits_RV: Tensor, vocab_ids: Tensor | None) -> list[int]:
        """Arg-max of scores plus noise that belongs to position and token id, whichever level looks."""
        scores_RV = processed(logits_RV, self.params)
        rows = [self._noise_at(first + 1 + row, scores_RV.device) for row in range(len(scores_RV))]
        noise_RV = torch.stack([row if vocab_ids is None else row[vocab_ids] for row in rows])
        picks_R = (scores_RV + noise_RV).argmax(-1)
        picks: list[int] = (picks_R if vocab_ids is None else vocab_ids[picks_R]).tolist()
        return picks

    def _noise_at(self, position: int, device: torch.device) -> Tensor:
        if position not in self._noise:
            self._noise[position] = gumbel(self.seed, position, self.vocab_size, device)
        return self._noise[position]

    def _rejection(self, first: int, logits_RV: Tensor, vocab_ids: Tensor | None, proposed: list[int]) -> Verdict:
        law_RV = processed(logits_RV, self.params).softmax(-1)
        if vocab_ids is not None:
            law_RV = law_RV.new_zeros(len(law_RV), self.vocab_size).index_copy(1, vocab_ids, law_RV)
        drawn_from = [self._laws[first + 1 + at] for at in range(len(proposed))]
        verdict = reject(law_RV, drawn_from, proposed, self.generator)
        # What stands now is distributed as this level's samples, whoever proposed it: the level above judges that.
        for row in range(verdict.accepted + (verdict.token is not None)):
            self._laws[first + 1 + row] = law_RV[row]
        return verdict
