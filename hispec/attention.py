"""The attention that every span runs, and the hook by which transformers reaches it.

Letters: H heads, G query heads per KV head, Q queries, K keys, T packed tokens, D head size.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from hispec.errors import UnsupportedModelError

NAME = "hispec"
# What some families hand to their attention besides queries, keys and values, and what would be wrong to ignore.
MORE = ("s_aux", "sinks", "position_bias", "indices", "block_indices")


class Attend(Protocol):
    """Attention over whatever the caller keeps keys and values in; called once per layer and pass."""

    def __call__(
        self,
        layer: int,
        q_HTD: Tensor,
        k_HTD: Tensor,
        v_HTD: Tensor,
        scale: float,
        window: int | None,
        cap: float | None,
    ) -> Tensor:
        """Return the attended values, [H, T, D], for packed tokens of one or several sequences."""
        ...


def attention(
    q_HQD: Tensor, k_HKD: Tensor, v_HKD: Tensor, scale: float, window: int | None = None, cap: float | None = None
) -> Tensor:
    """Causal attention of the last Q positions of one sequence over all K of them, [H, Q, D].

    Query heads that share a KV head are stacked as rows: grouped-query attention reads each key once, without copies.
    `window` counts the keys a query may see, itself included; `cap` soft-caps the scores.
    """
    n_heads, n_queries, head_dim = q_HQD.shape
    n_kv_heads, n_keys, _ = k_HKD.shape
    group = n_heads // n_kv_heads
    if window is not None and n_keys > window + n_queries - 1:
        # Keys that no query of this pass can see.
        n_keys = window + n_queries - 1
        k_HKD, v_HKD = k_HKD[:, -n_keys:], v_HKD[:, -n_keys:]
    if n_queries == n_keys and n_queries > 1 and cap is None and (window is None or n_keys <= window):
        # A whole document: no mask is built, and the library's causal kernel skips what is hidden.
        return F.scaled_dot_product_attention(
            q_HQD[None], k_HKD[None], v_HKD[None], is_causal=True, scale=scale, enable_gqa=group > 1
        )[0]
    mask_QK = None
    if n_queries > 1:
        build = _small_mask if n_queries <= 64 else _stacked_mask
        mask_QK = build(n_queries, n_keys, window, q_HQD.device, group)
    q_HRD = q_HQD.reshape(n_kv_heads, group * n_queries, head_dim)
    if cap is None:
        out_1HRD = F.scaled_dot_product_attention(q_HRD[None], k_HKD[None], v_HKD[None], mask_QK, scale=scale)
        out_HRD = out_1HRD[0]
    else:
        score_HRK = cap * torch.tanh(q_HRD @ k_HKD.transpose(1, 2) * scale / cap)
        if mask_QK is not None:
            score_HRK = score_HRK.masked_fill(~mask_QK, float("-inf"))
        out_HRD = score_HRK.float().softmax(-1).to(v_HKD.dtype) @ v_HKD
    return out_HRD.reshape(n_heads, n_queries, v_HKD.shape[-1])


def causal_mask(n_queries: int, n_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Bool mask [Q, K]; the last query stands at the last key.

    ::

        K = 5, Q = 2             window = 3
        x x x x .                . x x x .
        x x x x x                . . x x x
    """
    query_Q1 = torch.arange(n_keys - n_queries, n_keys, device=device)[:, None]
    key_K = torch.arange(n_keys, device=device)
    mask_QK = key_K <= query_Q1
    return mask_QK if window is None else mask_QK & (key_K > query_Q1 - window)


def _stacked_mask(n_queries: int, n_keys: int, window: int | None, device: torch.device, group: int) -> Tensor:
    return causal_mask(n_queries, n_keys, window, device).repeat(group, 1)


# All layers of a pass use the same masks; large ones are not worth keeping.
_small_mask = lru_cache(maxsize=64)(_stacked_mask)


class PackedAttention:
    """Attention without a cache: documents packed one after another, none sees another."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """`lengths`: tokens of each document, in order; their sum is T."""
        self.lengths = list(lengths)

    def __call__(
        self,
        layer: int,
        q_HTD: Tensor,
        k_HTD: Tensor,
        v_HTD: Tensor,
        scale: float,
        window: int | None,
        cap: float | None,
    ) -> Tensor:
        parts = zip(*(torch.split(x, self.lengths, dim=1) for x in (q_HTD, k_HTD, v_HTD)), strict=True)
        return torch.cat([attention(q, k, v, scale, window, cap) for q, k, v in parts], dim=1)


class _Active(threading.local):
    attend: Attend | None = None


_active = _Active()


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Make `attend` the one that layers of the trunk reach within this block, on this thread."""
    before, _active.attend = _active.attend, attend
    try:
        yield
    finally:
        _active.attend = before


def reach(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    if attention_mask is not None or more.get("is_causal") is False or any(more.get(name) is not None for name in MORE):
        raise UnsupportedModelError(
            f"{type(module).__name__} attends in a way that hispec's attention does not know (a mask of its own,"
            f" {', '.join(MORE)}); it cannot be a trunk"
        )
    assert _active.attend is not None, "a trunk on hispec's attention runs through Trunk.run only"
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out_HTD = _active.attend(module.layer_idx, query[0], key[0], value[0], scale, sliding_window, softcap)
    return out_HTD.transpose(0, 1).contiguous()[None], None  # contiguous, as some families demand


# No mask function is registered under this name, so transformers builds no mask at all.
AttentionInterface.register(NAME, reach)
