"""Paged KV storage, the tensors, and attention over them.

Letters: H heads, T packed tokens of a pass, K tokens of one sequence, D head size, S slots of the pool.
"""

import importlib.util
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass

import torch
from torch import Tensor

from hispec.attention import attention
from hispec.decode.blocks import BLOCK_SIZE, is_contiguous, slots
from hispec.errors import CapacityError
from hispec.trunk import KVShape


class KVCache:
    """Keys and values of every layer, trunk layers and head blocks alike: per layer [S, H, D].

    Attributes:
        trash_block, trash_slot: behind the pool's own blocks, where padding writes; no sequence ever reads there.
        kernels: whether attention runs through the Triton kernels; elsewhere through torch's own.
    """

    def __init__(self, shapes: dict[int, KVShape], n_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        """`shapes`: layer number to what it stores per token.

        Raises:
            CapacityError: the memory is not there.
        """
        self.device = device
        self.kernels = device.type == "cuda" and importlib.util.find_spec("triton") is not None
        self.trash_block, self.trash_slot = n_blocks, n_blocks * BLOCK_SIZE
        n_slots = self.trash_slot + BLOCK_SIZE
        # Neighbouring blocks are one slice there, others have to be gathered at every step.
        self.likes_neighbours = device.type == "cpu"
        try:
            self.keys = {
                i: torch.zeros(n_slots, s.heads, s.key_size, dtype=dtype, device=device) for i, s in shapes.items()
            }
            self.values = {
                i: torch.zeros(n_slots, s.heads, s.value_size, dtype=dtype, device=device) for i, s in shapes.items()
            }
        except (RuntimeError, MemoryError):
            raise CapacityError(
                f"KV pool: no memory for {n_blocks} blocks of {BLOCK_SIZE} tokens; lower max_batch or max_new_tokens"
            ) from None

    @torch.inference_mode()
    def copy(self, source: Sequence_[int], target: Sequence_[int]) -> None:
        """Copy whole blocks to others, in every layer."""
        from_S = torch.tensor([b * BLOCK_SIZE + i for b in source for i in range(BLOCK_SIZE)], device=self.device)
        to_S = torch.tensor([b * BLOCK_SIZE + i for b in target for i in range(BLOCK_SIZE)], device=self.device)
        for stored_SHD in (*self.keys.values(), *self.values.values()):
            stored_SHD[to_S] = stored_SHD[from_S]


def blocks_that_fit(free: int, total: int, utilization: float, block: int) -> int:
    """Blocks of `block` bytes for which a GPU has room, if all that is on it is to take `utilization` of its memory.

    Raises:
        CapacityError: not even one.
    """
    room = free - round((1 - utilization) * total)
    if room < 2 * block:  # one more is the trash block
        raise CapacityError(
            f"KV pool: {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free on the GPU, which leaves no room with"
            f" gpu_memory_utilization={utilization}; raise it, at most to 1, or free memory there"
        )
    return room // block - 1


def block_bytes(shapes: dict[int, KVShape], dtype: torch.dtype) -> int:
    """Bytes of one block in all layers."""
    return BLOCK_SIZE * dtype.itemsize * sum(s.heads * (s.key_size + s.value_size) for s in shapes.values())


@dataclass(frozen=True)
class Rows:
    """The tokens [start, stop) of one sequence, in a pass."""

    table: list[int]
    start: int
    stop: int


class PagedAttention:
    """Attention of one pass: writes its tokens' keys and values to the pool, then lets each sequence see its own.

    Sequences are taken one by one: nothing is padded, and no sequence's numbers depend on its neighbours.
    """

    def __init__(self, cache: KVCache, rows: Sequence_[Rows]) -> None:
        self.cache = cache
        device = next(iter(cache.keys.values())).device
        written = [slot for r in rows for slot in slots(r.table, r.start, r.stop)]
        self._written_T = torch.tensor(written, device=device)
        self._parts: list[tuple[int, int, slice | Tensor]] = []
        begin = 0
        for r in rows:
            seen: slice | Tensor
            if is_contiguous(r.table):
                first = r.table[0] * BLOCK_SIZE
                seen = slice(first, first + r.stop)
            else:
                seen = torch.tensor(slots(r.table, 0, r.stop), device=device)
            end = begin + r.stop - r.start
            self._parts.append((begin, end, seen))
            begin = end

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
        keys_SHD, values_SHD = self.cache.keys[layer], self.cache.values[layer]
        keys_SHD.index_copy_(0, self._written_T, k_HTD.transpose(0, 1))
        values_SHD.index_copy_(0, self._written_T, v_HTD.transpose(0, 1))
        outs = [
            attention(
                q_HTD[:, begin:end],
                _taken(keys_SHD, seen).transpose(0, 1),
                _taken(values_SHD, seen).transpose(0, 1),
                scale,
                window,
                cap,
            )
            for begin, end, seen in self._parts
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)


def _taken(stored_SHD: Tensor, seen: slice | Tensor) -> Tensor:
    # Twice as fast as indexing with a tensor.
    return stored_SHD[seen] if isinstance(seen, slice) else stored_SHD.index_select(0, seen)
