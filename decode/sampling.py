"""From logits to the distribution a request asks for, and the noise that sampling draws with.

Letters: R rows (positions), V vocabulary.
"""

from functools import lru_cache

import torch
from torch import Tensor

from hispec.decode.request import SamplingParams

_GOLDEN, _MIX1, _MIX2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_MASK64 = (1 << 64) - 1


def processed(logits_RV: Tensor, params: SamplingParams) -> Tensor:
    """Unnormalised log-probabilities [R, V] in fp64, after temperature, top-k and top-p; dropped tokens are -inf."""
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
