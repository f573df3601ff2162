"""What one request takes from logits: its options, its noise, and the laws its tokens were drawn from.

Letters: R rows (positions), V vocabulary, or the part of it that a head predicts.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from hispec.decode.request import SamplingParams
from hispec.decode.sampling import adjusted, gumbel, processed
from hispec.decode.verify import Verdict, reject
from hispec.ranks import fresh_seed


class Sampler:
    """The same rule at every level and position, so that levels differ in their logits only.

    Attributes:
        logprobs: per generated token, the full model's log-probabilities: its own first, then the likeliest.
    """

    def __init__(
        self, params: SamplingParams, choice: int, n_prompt: int, vocab_size: int, stop_ids: Iterable[int]
    ) -> None:
        self.params, self.n_prompt, self.vocab_size = params, n_prompt, vocab_size
        self.stop_ids = sorted(stop_ids)
        self.seed = fresh_seed() if params.seed is None else params.seed + choice
        self.generator = torch.Generator().manual_seed(self.seed % (1 << 63))
        self.logprobs: list[dict[int, float]] = []
        # What tokens need until they are committed: their noise (coupled), the law they are drawn from (rejection).
        self._noise: dict[int, Tensor] = {}
        self._laws: dict[int, Tensor] = {}

    @property
    def is_argmax(self) -> bool:
        """Whether a row's pick is the arg-max of its logits, as they are."""
        return self.params.greedy and not self.params.adjusts

    @property
    def picks_tokens(self) -> bool:
        """Whether a row has one pick, whatever was proposed: greedy and coupled sampling."""
        return self.params.greedy or self.params.rule == "coupled"

    def picks(self, first: int, ids: Sequence[int], logits_RV: Tensor, vocab_ids: Tensor | None) -> Tensor:
        """Columns [R] picked after positions `first`, `first + 1`, ...; `ids` are all tokens known."""
        scores_RV = self._scores(first, ids, logits_RV, vocab_ids)
        if not self.params.greedy:
            # The noise belongs to position and token id, whichever level looks.
            rows = [self._noise_at(first + 1 + row, scores_RV.device) for row in range(len(scores_RV))]
            scores_RV = scores_RV + torch.stack([row if vocab_ids is None else row[vocab_ids] for row in rows])
        return scores_RV.argmax(-1)

    def reject(
        self,
        first: int,
        ids: Sequence[int],
        logits_RV: Tensor,
        vocab_ids: Tensor | None,
        proposed: Sequence[int],
        drawn: bool = True,
    ) -> Verdict:
        """Speculative sampling of the tokens after position `first`; `drawn`: a level has drawn what is proposed.

        What was looked up comes from no draw: its law gives all to the one token.
        """
        law_RV = self._scores(first, ids, logits_RV, vocab_ids).softmax(-1)
        if vocab_ids is not None:
            law_RV = law_RV.new_zeros(len(law_RV), self.vocab_size).index_copy(1, vocab_ids, law_RV)
        if drawn:
            drawn_from = [self._laws[first + 1 + at] for at in range(len(proposed))]
        else:
            drawn_from = list(one_hot(torch.tensor(proposed, device=law_RV.device), self.vocab_size).to(law_RV.dtype))
        verdict = reject(law_RV, drawn_from, proposed, self.generator)
        # What stands now is distributed as this level's samples, whoever proposed it: the level above judges that.
        for row in range(verdict.accepted + (verdict.token is not None)):
            self._laws[first + 1 + row] = law_RV[row]
        return verdict

    def note(self, logits_RV: Tensor, tokens: Sequence[int]) -> None:
        """Keep the log-probabilities of tokens that the full model has decided on, if they are wanted."""
        if self.params.logprobs is None or not tokens:
            return
        logprob_RV = logits_RV[: len(tokens)].double().log_softmax(-1)
        best = logprob_RV.topk(self.params.logprobs)
        own = logprob_RV.gather(1, torch.tensor(tokens, device=logprob_RV.device)[:, None])[:, 0].tolist()
        for token, value, ids, values in zip(tokens, own, best.indices.tolist(), best.values.tolist(), strict=True):
            self.logprobs.append({token: value} | dict(zip(ids, values, strict=True)))

    def forget(self, n_committed: int) -> None:
        """Drop what only uncommitted tokens need."""
        for kept in (self._noise, self._laws):
            for position in [p for p in kept if p < n_committed]:
                del kept[position]

    def _scores(self, first: int, ids: Sequence[int], logits_RV: Tensor, vocab_ids: Tensor | None) -> Tensor:
        if self.params.adjusts:
            histories = [ids[: first + 1 + row] for row in range(len(logits_RV))]
            logits_RV = adjusted(logits_RV, self.params, histories, self.n_prompt, self.stop_ids, vocab_ids)
        return logits_RV if self.params.greedy else processed(logits_RV, self.params)

    def _noise_at(self, position: int, device: torch.device) -> Tensor:
        if position not in self._noise:
            self._noise[position] = gumbel(self.seed, position, self.vocab_size, device)
        return self._noise[position]
