"""What a head is told: how far it is from the full model, per supervised position.

A head's logits over the whole vocabulary are the largest thing in training. They exist for `chunk` positions at a time:
each chunk's gradient is taken at once, in the forward pass, and only the gradient of the features [S, D] is kept.

Letters: S supervised positions, C positions of a chunk, D hidden size, V vocabulary (or the head's part of it).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hispec.train.config import LossConfig

METRICS = ("loss", "kl", "ce", "acceptance", "top1")


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


class HeadLoss(NamedTuple):
    """Sums over positions: the loss, which has a gradient, and every metric of METRICS, which have none."""

    loss: Tensor
    sums_M: Tensor


def head_loss(
    features_SD: Tensor, truth: Truth, unembed: Callable[[Tensor], Tensor], vocab_ids: Tensor | None, config: LossConfig
) -> HeadLoss:
    """The loss of one head, summed over positions; divide by the positions of the whole step.

    `unembed` maps features to logits over `vocab_ids` (None: the whole vocabulary), both for the head and for the full
    model, which share it. Its parameters get no gradient.
    """
    loss, sums_M = _Chunked.apply(features_SD, truth, unembed, vocab_ids, config)  # type: ignore[no-untyped-call]
    return HeadLoss(loss, sums_M)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features_SD: Tensor,
        truth: Truth,
        unembed: Callable[[Tensor], Tensor],
        vocab_ids: Tensor | None,
        config: LossConfig,
    ) -> tuple[Tensor, Tensor]:
        grad_SD = torch.zeros_like(features_SD)
        sums_M = torch.zeros(len(METRICS), dtype=torch.float64, device=features_SD.device)
        for start in range(0, len(features_SD), config.chunk):
            stop = min(start + config.chunk, len(features_SD))
            with torch.enable_grad():
                part_CD = features_SD[start:stop].detach().requires_grad_()
                loss, metrics_M = dense_loss(part_CD, truth.rows(start, stop), unembed, vocab_ids, config)
                (grad_SD[start:stop],) = torch.autograd.grad(loss, part_CD)
            sums_M += metrics_M
        ctx.save_for_backward(grad_SD)
        ctx.mark_non_differentiable(sums_M)
        return sums_M[0].to(features_SD.dtype), sums_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (grad_SD,) = ctx.saved_tensors
        return grad_SD * grads[0], None, None, None, None


def dense_loss(
    features_CD: Tensor, truth: Truth, unembed: Callable[[Tensor], Tensor], vocab_ids: Tensor | None, config: LossConfig
) -> HeadLoss:
    """As `head_loss`, with all logits at once: one chunk, and the dull twin that the chunked one is tested against.

    All of it in float32. With a reduced vocabulary the head can only be as good as the full model restricted to it: KL
    compares with that, renormalised; acceptance counts the full model's true probabilities.
    """
    with torch.no_grad():
        full_CV = unembed(truth.final_SD).float()
    head_CV = unembed(features_CD).float()
    log_q_CV = head_CV.log_softmax(-1)

    tau = config.temperature
    log_p_CV = (full_CV / tau).log_softmax(-1)
    softened_CV = log_q_CV if tau == 1.0 else (head_CV / tau).log_softmax(-1)
    # tau^2 keeps the gradient's size as tau varies (Hinton et al., arXiv 1503.02531).
    kl = F.kl_div(softened_CV, log_p_CV, reduction="sum", log_target=True) * tau**2

    # The chance that a sampled draft is accepted (Leviathan et al., arXiv 2211.17192).
    p_CV = (full_CV - truth.logsumexp_S[:, None]).exp()
    accepted_C = torch.minimum(p_CV, log_q_CV.exp()).sum(-1)
    acceptance = -accepted_C.clamp_min(1e-6).log().sum()

    ce = _cross_entropy(log_q_CV, truth.targets_S, vocab_ids)
    parts = ((config.kl, kl), (config.ce, ce), (config.acceptance, acceptance))
    # A part of no weight is measured only: no gradient runs through its logits-sized tensors.
    loss = torch.stack([weight * part for weight, part in parts if weight]).sum()
    picks_C = head_CV.argmax(-1) if vocab_ids is None else vocab_ids[head_CV.argmax(-1)]
    top1 = (picks_C == truth.argmax_S).sum()
    metrics = [x.detach().double() for x in (loss, kl, ce, accepted_C.sum(), top1)]
    return HeadLoss(loss, torch.stack(metrics))


def _cross_entropy(log_q_CV: Tensor, targets_C: Tensor, vocab_ids: Tensor | None) -> Tensor:
    """Summed over positions that have a target, and have it in the head's vocabulary."""
    known_C = targets_C >= 0
    if vocab_ids is not None:
        place_C = torch.searchsorted(vocab_ids, targets_C.clamp_min(0)).clamp_max(len(vocab_ids) - 1)
        known_C = known_C & (vocab_ids[place_C] == targets_C)
        targets_C = place_C
    picked_C = log_q_CV.gather(-1, targets_C.clamp_min(0)[:, None])[:, 0]
    return -(picked_C * known_C).sum()
