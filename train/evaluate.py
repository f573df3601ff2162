"""How good the heads are, on prompts they were not trained on: three answers to one question.

Teacher-forced: on the trunk's own greedy answers, how often each head says what the full model says. Simulated: what
chain of passes these agreements would give under the policy. Measured: the decoder itself, with the heads, on the same
prompts. Simulated and measured must agree, else training and decoding do not see the same thing.

Letters: T tokens, S supervised positions (one per answer token), C of a chunk, D hidden size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hispec.attention import PackedAttention
from hispec.decode.decoder import Decoder
from hispec.decode.policy import parse_policy
from hispec.decode.request import Completion, SamplingParams
from hispec.decode.stats import LevelStats, Stats
from hispec.heads import Head
from hispec.model import HiSpecModel
from hispec.train.config import EvalConfig
from hispec.train.data import Document, MicroBatch
from hispec.train.features import compute
from hispec.train.losses import Truth
from hispec.train.masks import supervised
from hispec.train.simulate import simulate


@dataclass
class _Exit:
    """Sums over all answers, for one exit."""

    exit: int
    top1: float = 0.0
    acceptance: float = 0.0
    picks: list[list[int]] = field(default_factory=list)


class Evaluation:
    """Holds the trunk's answers, which do not change while heads learn.

    Attributes:
        decoded: what the last call decoded with the heads, one completion per prompt.
    """

    def __init__(self, model: HiSpecModel, prompts: Sequence[list[int]], config: EvalConfig) -> None:
        """`model`: the trunk; its heads are not used. `prompts`: token ids. Decodes plainly, once."""
        self.config, self.prompts = config, list(prompts)
        self.params = SamplingParams(max_new_tokens=config.max_new_tokens)
        self.answers, _ = self._decode(model, ())
        self.decoded: list[Completion] = []

    def __call__(self, model: HiSpecModel) -> dict[str, Any]:
        """Measure `model`'s heads: the `metrics` that a heads folder records."""
        exits = [_Exit(head.exit) for head in model.heads_list]
        n_tokens = 0
        for answer in self.answers:
            n_tokens += len(answer.ids)
            self._force(model, answer, exits)
        self.decoded, stats = self._decode(model, None)
        rows = [
            {
                "exit": exit_.exit,
                "top1": exit_.top1 / n_tokens,
                "acceptance": exit_.acceptance / n_tokens,
                "tokens_per_full_pass": self._simulate([exit_]),
            }
            for exit_ in exits
        ]
        same = sum(a.ids == b.ids for a, b in zip(self.decoded, self.answers, strict=True))
        return {
            "exits": rows,
            "simulated_tokens_per_full_pass": self._simulate(exits),
            "measured_tokens_per_full_pass": stats.tokens_per_full_pass or 1.0,
            "judges": [_judge(level, model.trunk.n_layers) for level in stats.levels[1:]],
            "identical_outputs": same / len(self.decoded),
            "prompts": len(self.prompts),
            "tokens": n_tokens,
            "policy": self.config.policy,
        }

    def _decode(self, model: HiSpecModel, exits: tuple[int, ...] | None) -> tuple[list[Completion], Stats]:
        decoder = Decoder(model, exits=exits, policy=self.config.policy)
        try:
            return decoder.generate(self.prompts, self.params), decoder.stats
        finally:
            decoder.close()

    @torch.no_grad()
    def _force(self, model: HiSpecModel, answer: Completion, exits: list[_Exit]) -> None:
        """Add what each head says along one answer."""
        marks = supervised([False] * len(answer.prompt_ids) + [True] * len(answer.ids))
        batch = MicroBatch((Document(answer.prompt_ids + answer.ids, marks),))
        features = compute(model.trunk, model.exits, batch)
        device = model.trunk.device
        ids_T, positions_T, rows_S = (x.to(device) for x in (batch.ids_T, batch.positions_T, batch.rows_S))
        for head, exit_ in zip(model.heads_list, exits, strict=True):
            state_TD = head.features(features.hidden[head.exit], ids_T, positions_T, PackedAttention(batch.lengths))
            top1, acceptance, picks = agreement(head, state_TD[rows_S], features.truth)
            exit_.top1 += top1
            exit_.acceptance += acceptance
            exit_.picks.append(picks)

    def _simulate(self, exits: list[_Exit]) -> float:
        policy = parse_policy(self.config.policy, len(exits) + 1)
        texts = [answer.ids for answer in self.answers]
        runs = [simulate([*(exit_.picks[at] for exit_ in exits), text], policy) for at, text in enumerate(texts)]
        passes = sum(run.full_passes for run in runs)
        return sum(run.tokens for run in runs) / passes if passes else 1.0


def _judge(level: LevelStats, n_layers: int) -> dict[str, Any]:
    """What a level let stand while decoding: of all that it judged, and by place in what lay before it."""
    return {
        "judge": "full model" if level.exit == n_layers else f"exit {level.exit}",
        "accepted": level.acceptance or 0.0,
        "accepted_at": list(level.accepted_at),
        "judged_at": list(level.judged_at),
    }


def agreement(head: Head, features_SD: Tensor, truth: Truth, chunk: int = 256) -> tuple[int, float, list[int]]:
    """One head against the full model: equal greedy tokens and min(p, q), both summed, and the head's tokens [S]."""
    top1, acceptance, picks = 0, 0.0, []
    for start in range(0, len(features_SD), chunk):
        part = truth.rows(start, start + chunk)
        head_CV = head.logits(features_SD[start : start + chunk]).float()
        p_CV = (head.shared(part.final_SD).float() - part.logsumexp_S[:, None]).exp()
        acceptance += float(torch.minimum(p_CV, head_CV.softmax(-1)).sum())
        picks_C = head_CV.argmax(-1) if head.vocab_ids is None else head.vocab_ids[head_CV.argmax(-1)]
        top1 += int((picks_C == part.argmax_S).sum())
        picks += picks_C.tolist()
    return top1, acceptance, picks
