"""What every head learns in a step, and from whom.

    teacher=full         every head <- the full model
    teacher=next         head 0 <- head 1 <- ... <- the full model: who judges a draft first is who it learns from
    teacher=0.3          head 0 <- 0.7 the full model + 0.3 head 1; the last head <- the full model

Letters: C positions of a chunk, H heads, M metrics, V vocabulary of a head.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hispec.heads import Head, Reading
from hispec.train.losses import Lesson, StepLoss, Truth, on_vocabulary, step_loss
from hispec.train.optim_config import LossConfig


def step_losses(
    heads: Sequence[Head], readings: Sequence[Reading], truth: Truth, config: LossConfig, progress: float
) -> StepLoss:
    """Loss of all heads, summed over positions, and the metrics of each, [H, M].

    `progress`: share of the run that is behind, by which the weights of the losses move from their first to their last.
    """
    weights = config.weights_at(progress)
    # Gradients are taken of float32, whatever the precision of the products.
    readings = [reading._replace(features_SD=reading.features_SD.float()) for reading in readings]
    lessons = [
        Lesson(
            head.read, head.shared, head.vocab_ids, weights, _next_level(heads, readings, at), config.share_of_next,
            config.temperature, config.chunk, _same_vocabulary(heads, at),
        )
        for at, head in enumerate(heads)
    ]  # fmt: skip
    return step_loss(readings, truth, lessons)


def _same_vocabulary(heads: Sequence[Head], at: int) -> int:
    """Number of the first head whose logits stand for the same tokens."""
    own = heads[at].vocab_ids
    for number, head in enumerate(heads[:at]):
        ids = head.vocab_ids
        if own is ids or (own is not None and ids is not None and torch.equal(own, ids)):
            return number
    return at


def _next_level(heads: Sequence[Head], readings: Sequence[Reading], at: int) -> Callable[[int, int], Tensor] | None:
    if at + 1 == len(heads):
        return None
    head, above = heads[at], heads[at + 1]
    reading = Reading(*(None if part is None else part.detach() for part in readings[at + 1]))  # type: ignore[arg-type]

    def log_p_CV(start: int, stop: int) -> Tensor:
        own_CV = above.read(reading.rows(start, stop)).float().log_softmax(-1)
        return on_vocabulary(own_CV, above.vocab_ids, head.vocab_ids, head.trunk.vocab_size)

    return log_p_CV
