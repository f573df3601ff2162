"""From logits to the distribution a request asks for, and the noise that sampling draws with.

Letters: R rows (positions), V vocabulary.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from hispec.decode.request import BANNED, SamplingParams

_GOLDEN, _MIX1, _MIX2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_MASK64 = (1 << 64) - 1


def adjusted(
    logits_RV: Tensor,
    params: SamplingParams,
    histories: Sequence[Sequence[int]],
    n_prompt: int,
    stop_ids: Sequence[int],
    vocab_ids: Tensor | None = None,
) -> Tensor:
    """Logits [R, V] in fp32 after logit_bias, min_new_tokens and the penalties, which see each row's own history.

    `histories`: per row, all tokens before the one that the row predicts, drafts included. `vocab_ids`: the token ids
    of the columns, where they are a part of the vocabulary.
    """
    out_RV = logits_RV.float().clone()
    column_of = None if vocab_ids is None else {token: at for at, token in enumerate(vocab_ids.tolist())}

    def columns(tokens: Sequence[int]) -> Tensor:
        listed = tokens if column_of is None else [column_of[token] for token in tokens if token in column_of]
        return torch.tensor(listed, dtype=torch.long, device=out_RV.device)

    for token, bias in params.logit_bias.items():
        out_RV[:, columns([token])] += float("-inf") if bias == BANNED else bias
    barred, size = columns(stop_ids), out_RV.shape[-1]
    for scores_V, history in zip(out_RV, histories, strict=True):
        if len(history) - n_prompt < params.min_new_tokens:
            scores_V[barred] = float("-inf")
        seen_V = torch.bincount(columns(history), minlength=size) > 0
        penalised_V = torch.where(
            scores_V > 0, scores_V / params.repetition_penalty, scores_V * params.repetition_penalty
        )
        times_V = torch.bincount(columns(history[n_prompt:]), minlength=size)
        scores_V.copy_(torch.where(seen_V, penalised_V, scores_V))
        scores_V -= params.frequency_penalty * times_V + params.presence_penalty * (times_V > 0)
    return out_RV


def processed(logits_RV: Tensor, params: SamplingParams) -> Tensor:
    """Unnormalised log-probabilities [R, V] in fp64, after temperature, top-k, top-p and min-p, in this order; dropped
    tokens are -inf."""
    scores_RV = logits_RV.double() / params.temperature
    if 0 < params.top_k < scores_RV.shape[-1]:
        floor_R1 = scores_RV.topk(params.top_k).values[:, -1:]
        scores_RV = scores_RV.masked_fill(scores_RV < floor_R1, float("-inf"))
    if params.top_p < 1.0:
        sorted_RV, order_RV = scores_RV.sort(descending=True, stable=True)
        probs_RV = sorted_RV.softmax(-1)
        # A token goes if those before it have the probability already; the first never does.
        gone_RV = (probs_RV.cumsum(-1) - probs_RV) >= params.top_p
        gone_RV[:, 0] = False
        scores_RV = scores_RV.masked_fill(torch.zeros_like(gone_RV).scatter(-1, order_RV, gone_RV), float("-inf"))
    if params.min_p > 0.0:
        floor_R1 = scores_RV.amax(-1, keepdim=True) + math.log(params.min_p)
        scores_RV = scores_RV.masked_fill(scores_RV < floor_R1, float("-inf"))
    return scores_RV


def gumbel(seed: int, position: int, vocab_size: int, device: torch.device) -> Tensor:
    """Gumbel noise [V] in fp64: a function of seed, position and token id alone, the same on every device.

    A counter-based generator (splitmix64, Steele et al. 2014) over the token ids: every level that looks at a position
    sees the same noise, whenever and in whatever batch it looks (coupled sampling, arXiv 2408.07978).
    """
    key = _mix_int(_mix_int(seed) + position)
    bits_V = _mix(_spread(vocab_size, device) + _signed(key))
    uniform_V = (((bits_V >> 11) & ((1 << 53) - 1)).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform_V))


@lru_cache(maxsize=4)
def _spread(vocab_size: int, device: torch.device) -> Tensor:
    return torch.arange(1, vocab_size + 1, device=device) * _GOLDEN


def _mix(x: Tensor) -> Tensor:
    # int64 arithmetic wraps; the masks make its right shifts logical ones.
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _mix_int(x: int) -> int:
    x = (x + _GOLDEN) & _MASK64
    x = ((x ^ (x >> 30)) * _MIX1) & _MASK64
    x = ((x ^ (x >> 27)) * _MIX2) & _MASK64
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x
