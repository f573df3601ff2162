"""What a head is told: how far it is from its teacher, per supervised position.

A head's logits over the whole vocabulary are the largest thing in training. They exist for `chunk` positions at a time:
each chunk's gradient is taken at once, in the forward pass, and only the gradients of what the head hands over (its
features, [S, D]) are kept. So memory does not grow with the number of heads, nor with the positions.

Letters: S supervised positions, C positions of a chunk, D hidden size, V vocabulary (or the head's part of it).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hispec.heads import Reading

METRICS = ("loss", "kl", "ce", "acceptance", "top1")
# Logarithm of a chance that is none: as good as -inf, but 0 x this is 0.
NEVER = -1e4


@dataclass(frozen=True)
class Truth:
    """What the full model says at the supervised positions.

    final_SD: the features it reads its logits from. logsumexp_S: of its logits over the whole vocabulary.
    argmax_S: its greedy token. targets_S: the data's own next token, -1 where there is none.
    """

    final_SD: Tensor
    logsumexp_S: Tensor
    argmax_S: Tensor
    targets_S: Tensor

    def rows(self, start: int, stop: int) -> "Truth":
        """Some of the positions."""
        return Truth(*(x[start:stop] for x in (self.final_SD, self.logsumexp_S, self.argmax_S, self.targets_S)))


class Teacher:
    """Who is learned from at C positions, over the vocabulary of a head; heads that share one share this."""

    def __init__(self, log_CV: Tensor, temperature: float = 1.0) -> None:
        """`log_CV`: true logarithms of probability. `temperature` softens `log_p_CV`."""
        self.log_CV, self.temperature = log_CV, temperature

    @cached_property
    def p_CV(self) -> Tensor:
        """Probabilities; over a part of the vocabulary their sum is below 1."""
        return self.log_CV.exp()

    @cached_property
    def log_p_CV(self) -> Tensor:
        """Softened, and renormalised over the head's vocabulary: what a head can be at best."""
        return (self.log_CV if self.temperature == 1.0 else self.log_CV / self.temperature).log_softmax(-1)


class Pair:
    """One head against one teacher at C positions, all of it in float32, computed when first asked for."""

    def __init__(self, head_CV: Tensor, teacher: Teacher, targets_C: Tensor, vocab_ids: Tensor | None) -> None:
        """`head_CV`: logits."""
        self.head_CV, self.teacher, self.targets_C, self.vocab_ids = head_CV, teacher, targets_C, vocab_ids
        self.temperature = teacher.temperature

    @property
    def log_p_CV(self) -> Tensor:
        return self.teacher.log_p_CV

    @cached_property
    def log_q_CV(self) -> Tensor:
        return self.true_log_q_CV if self.temperature == 1.0 else (self.head_CV / self.temperature).log_softmax(-1)

    @cached_property
    def true_log_q_CV(self) -> Tensor:
        return self.head_CV.log_softmax(-1)

    @cached_property
    def accepted_C(self) -> Tensor:
        """The chance that a sampled draft is accepted: sum of min(p, q) (Leviathan et al., arXiv 2211.17192)."""
        return torch.minimum(self.teacher.p_CV, self.true_log_q_CV.exp()).sum(-1)


def ce(pair: Pair) -> Tensor:
    """Cross-entropy on the data's own next token, where there is one and the head's vocabulary has it."""
    targets_C = pair.targets_C
    known_C = targets_C >= 0
    if pair.vocab_ids is not None:
        place_C = torch.searchsorted(pair.vocab_ids, targets_C.clamp_min(0)).clamp_max(len(pair.vocab_ids) - 1)
        known_C = known_C & (pair.vocab_ids[place_C] == targets_C)
        targets_C = place_C
    picked_C = pair.true_log_q_CV.gather(-1, targets_C.clamp_min(0)[:, None])[:, 0]
    return -(picked_C * known_C).sum()


def kl(pair: Pair) -> Tensor:
    """KL(p | q): the head must cover everything the teacher may say."""
    return _kl(pair.log_p_CV, pair.log_q_CV) * pair.temperature**2


def reverse_kl(pair: Pair) -> Tensor:
    """KL(q | p): the head must say nothing that the teacher would not."""
    return _kl(pair.log_q_CV, pair.log_p_CV) * pair.temperature**2


def jsd(pair: Pair) -> Tensor:
    """Jensen-Shannon divergence: both against their mean, half each."""
    half = torch.log(torch.tensor(0.5))
    log_m_CV = torch.logaddexp(pair.log_p_CV, pair.log_q_CV) + half
    return 0.5 * (_kl(pair.log_p_CV, log_m_CV) + _kl(pair.log_q_CV, log_m_CV)) * pair.temperature**2


def tv(pair: Pair) -> Tensor:
    """Total variation, which is the chance that a sampled draft is rejected."""
    return (1.0 - pair.accepted_C).sum()


def acceptance(pair: Pair) -> Tensor:
    """-log of the chance that a sampled draft is accepted."""
    return -pair.accepted_C.clamp_min(1e-6).log().sum()


LOSSES: dict[str, Callable[[Pair], Tensor]] = {
    "ce": ce, "kl": kl, "reverse_kl": reverse_kl, "jsd": jsd, "tv": tv, "acceptance": acceptance,
}  # fmt: skip


def _kl(log_p_CV: Tensor, log_q_CV: Tensor) -> Tensor:
    # The factor temperature^2, which callers add, keeps the gradient's size (Hinton et al., arXiv 1503.02531).
    return F.kl_div(log_q_CV, log_p_CV, reduction="sum", log_target=True)


@dataclass(frozen=True)
class Lesson:
    """What one head learns in a step.

    read: what the head hands over to its logits. vocab_ids: the tokens these stand for, None for all.
    full: the full model's features to its logits over the same tokens.
    next_level: positions to logarithms of the next level's probabilities of these tokens; None: there is none.
    share: of the next level in the teacher; the rest is the full model. weights: of the losses.
    vocabulary: a number that heads with the same tokens have in common.
    """

    read: Callable[[Reading], Tensor]
    full: Callable[[Tensor], Tensor]
    vocab_ids: Tensor | None
    weights: Mapping[str, float]
    next_level: Callable[[int, int], Tensor] | None = None
    share: float = 0.0
    temperature: float = 1.0
    chunk: int = 256
    vocabulary: int = 0


class StepLoss(NamedTuple):
    """Sums over positions: the loss of all heads, which has a gradient, and each one's METRICS, which have none."""

    loss: Tensor
    sums_HM: Tensor


def step_loss(readings: Sequence[Reading], truth: Truth, lessons: Sequence[Lesson]) -> StepLoss:
    """The loss of all heads, summed over positions; divide by the positions of the whole step."""
    parts = [part for reading in readings for part in reading]
    return StepLoss(*_Chunked.apply(truth, lessons, *parts))  # type: ignore[no-untyped-call]


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, truth: Truth, lessons: Sequence[Lesson], *parts: Tensor | None) -> tuple[Tensor, Tensor]:
        grads = [None if part is None else torch.zeros_like(part, dtype=_sum(part)) for part in parts]
        n = len(truth.final_SD)
        sums_HM = torch.zeros(len(lessons), len(METRICS), dtype=torch.float64, device=truth.final_SD.device)
        for start in range(0, n, lessons[0].chunk):
            stop = min(start + lessons[0].chunk, n)
            teachers: dict[int, Teacher] = {}
            for at, lesson in enumerate(lessons):
                reading, into = (_readings(some)[at].rows(start, stop) for some in (parts, grads))
                with torch.enable_grad():
                    cut = (None if part is None else part.detach().requires_grad_() for part in reading)
                    leaves = Reading(*cut)  # type: ignore[arg-type]
                    loss, metrics_M = dense_loss(leaves, truth, lesson, start, stop, teachers)
                    found = torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None])
                for grad, own in zip((grad for grad in into if grad is not None), found, strict=True):
                    grad += own
                sums_HM[at] += metrics_M
        ctx.grads = [
            None if part is None or grad is None else grad.to(part.dtype)
            for part, grad in zip(parts, grads, strict=True)
        ]
        ctx.mark_non_differentiable(sums_HM)
        return sums_HM[:, 0].sum().float(), sums_HM

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(None if grad is None else grad * outer[0] for grad in ctx.grads))


def _readings(parts: Sequence[Tensor | None]) -> list[Reading]:
    n = len(Reading._fields)
    return [Reading(*parts[at : at + n]) for at in range(0, len(parts), n)]  # type: ignore[arg-type]


def _sum(part: Tensor) -> torch.dtype:
    # To a matrix all chunks add, so its gradient is kept in float32 whatever its own precision.
    return torch.promote_types(part.dtype, torch.float32)


def dense_loss(
    reading: Reading,
    truth: Truth,
    lesson: Lesson,
    start: int = 0,
    stop: int | None = None,
    teachers: dict[int, Teacher] | None = None,
) -> tuple[Tensor, Tensor]:
    """One head's loss and metrics [M], with all logits of the positions [start, stop) at once.

    A chunk of `step_loss`, and its dull twin. `teachers`: the full model over vocabularies that are known already.
    """
    stop = len(truth.final_SD) if stop is None else stop
    truth = truth.rows(start, stop)
    vocab_ids, teachers = lesson.vocab_ids, {} if teachers is None else teachers
    if lesson.vocabulary not in teachers:
        with torch.no_grad():
            log_CV = lesson.full(truth.final_SD).float() - truth.logsumexp_S[:, None]
        teachers[lesson.vocabulary] = Teacher(log_CV, lesson.temperature)
    head_CV = lesson.read(reading).float()
    pair = full = Pair(head_CV, teachers[lesson.vocabulary], truth.targets_S, vocab_ids)
    if lesson.next_level is not None and lesson.share:
        with torch.no_grad():
            log_CV = _mixed(full.teacher.log_CV, lesson.next_level(start, stop), lesson.share)
        pair = Pair(head_CV, Teacher(log_CV, lesson.temperature), truth.targets_S, vocab_ids)
    parts = {name: LOSSES[name](pair) for name, weight in lesson.weights.items() if weight}
    loss = torch.stack([lesson.weights[name] * part for name, part in parts.items()]).sum()
    with torch.no_grad():
        known = parts if pair is full else {}
        measured = [known[name] if name in known else LOSSES[name](full) for name in ("kl", "ce")]
        picks_C = head_CV.argmax(-1) if vocab_ids is None else vocab_ids[head_CV.argmax(-1)]
        top1 = (picks_C == truth.argmax_S).sum()
        metrics = [x.detach().double() for x in (loss, *measured, full.accepted_C.sum(), top1)]
    return loss, torch.stack(metrics)


def _mixed(full_CV: Tensor, next_CV: Tensor, share: float) -> Tensor:
    """Logarithm of (1 - share) x full + share x next."""
    if share == 1.0:
        return next_CV
    log = torch.log(torch.tensor([1.0 - share, share]))
    return torch.logaddexp(full_CV + log[0], next_CV + log[1])


def on_vocabulary(log_p_CV: Tensor, own_ids: Tensor | None, wanted_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Logarithms of probability over `own_ids`, told over `wanted_ids`; `NEVER` for tokens that are not among its own.

    Both lists rise; None stands for the whole vocabulary, of `vocab_size`.
    """
    if own_ids is None:
        return log_p_CV if wanted_ids is None else log_p_CV[:, wanted_ids]
    if wanted_ids is None:
        wanted_ids = torch.arange(vocab_size, device=own_ids.device)
    place_V = torch.searchsorted(own_ids, wanted_ids).clamp_max(len(own_ids) - 1)
    return log_p_CV[:, place_V].masked_fill(own_ids[place_V] != wanted_ids, NEVER)
