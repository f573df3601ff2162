"""What goes into one pass of a level: tokens, their places, and the attention that finds their sequences' pages.

On a GPU all indices of a pass are one integer tensor on the host and reach the device in one copy:

    [ ids | positions | owners | row starts | tables | short ones | long ones ]      each part 16-byte aligned

Letters: B sequences of a pass, T packed tokens, N blocks of a table, H heads, D head size.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hispec.attention import Attend
from hispec.decode.blocks import BLOCK_SIZE, blocks_for
from hispec.decode.cache import KVCache, PagedAttention, Rows

# Sequences with more query tokens than this in one pass (prompts) are attended for by a launch of their own.
SHORT = 16


class Part(NamedTuple):
    """One sequence's share of a pass: tokens from position `start` on, its table, its states [n, D] from below."""

    ids: list[int]
    start: int
    table: list[int]
    hidden_nD: Tensor | None = None


class Feed(NamedTuple):
    """The inputs of one pass, on the device."""

    ids_T: Tensor
    positions_T: Tensor
    attend: Attend
    hidden_TD: Tensor | None


class Index(NamedTuple):
    """Where a pass's tokens stand, int32 on the device; a token at position -1 is padding.

    `groups`: sequences that are attended for by one launch, and the most tokens that one of them has.
    """

    positions_T: Tensor
    owners_T: Tensor
    row_starts_B1: Tensor
    tables_BN: Tensor
    groups: tuple[tuple[Tensor, int], ...]

    def rows(self, trash_block: int) -> list[Rows]:
        """The same on the host; each padding token is a sequence of its own, in the trash block."""
        rows: list[Rows] = []
        positions = self.positions_T.tolist()
        for table, (begin, end) in zip(self.tables_BN.tolist(), pairwise(self.row_starts_B1.tolist()), strict=True):
            real = [position for position in positions[begin:end] if position >= 0]
            if real:
                rows.append(Rows(table[: blocks_for(real[-1] + 1)], real[0], real[-1] + 1))
            rows += [Rows([trash_block], 0, 1)] * (end - begin - len(real))
        return rows


class KernelAttention:
    """Attention of one pass through the Triton kernels: two or three launches per layer, no work on the host."""

    def __init__(self, cache: KVCache, index: Index) -> None:
        from hispec.decode import kernels  # needs triton, which a CPU install has not

        self.cache, self.index, self._kernels = cache, index, kernels

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
        q_HTD, k_HTD, v_HTD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_HTD, k_HTD, v_HTD))
        keys_SHD, values_SHD = self.cache.keys[layer], self.cache.values[layer]
        at = self.index
        self._kernels.write(
            keys_SHD, values_SHD, k_HTD, v_HTD, at.positions_T, at.owners_T, at.tables_BN, self.cache.trash_slot
        )
        out_THD = q_HTD.new_empty(q_HTD.shape[1], q_HTD.shape[0], values_SHD.shape[2])
        for chosen_C, max_rows in at.groups:
            self._kernels.attend(
                q_HTD, keys_SHD, values_SHD, at.positions_T, at.row_starts_B1, at.tables_BN, chosen_C, max_rows,
                out_THD, scale, window, cap,
            )  # fmt: skip
        return out_THD.transpose(0, 1)


def attention_over(cache: KVCache, index: Index) -> Attend:
    """The attention of a pass that stands at `index`."""
    return KernelAttention(cache, index) if cache.kernels else PagedAttention(cache, index.rows(cache.trash_block))


def make_feed(cache: KVCache, parts: Sequence[Part]) -> Feed:
    """Pack the parts of a pass, one sequence after another."""
    hiddens = [part.hidden_nD for part in parts if part.hidden_nD is not None]
    hidden_TD = None if not hiddens else hiddens[0] if len(hiddens) == 1 else torch.cat(hiddens)
    ids = [token for part in parts for token in part.ids]
    positions = [at for part in parts for at in range(part.start, part.start + len(part.ids))]
    if not cache.kernels:
        attend = PagedAttention(cache, [Rows(part.table, part.start, part.start + len(part.ids)) for part in parts])
        return Feed(
            torch.tensor(ids, device=cache.device), torch.tensor(positions, device=cache.device), attend, hidden_TD
        )
    width = max(blocks_for(part.start + len(part.ids)) for part in parts)
    lengths = [len(part.ids) for part in parts]
    groups = [[b for b, n in enumerate(lengths) if (n <= SHORT) is short] for short in (True, False)]
    ids_T, positions_T, owners_T, row_starts_B1, tables_T, *chosen = stage(
        [
            ids,
            positions,
            [b for b, n in enumerate(lengths) for _ in range(n)],
            [0, *accumulate(lengths)],
            [block for part in parts for block in (part.table[:width] + [0] * (width - len(part.table)))],
            *groups,
        ],
        cache.device,
    )
    index = Index(
        positions_T, owners_T, row_starts_B1, tables_T.view(len(parts), width),
        tuple((own_C, max(lengths[b] for b in group)) for own_C, group in zip(chosen, groups, strict=True) if group),
    )  # fmt: skip
    return Feed(ids_T.long(), positions_T.long(), KernelAttention(cache, index), hidden_TD)


def stage(fields: Sequence[list[int]], device: torch.device) -> list[Tensor]:
    """Lists of integers as int32 tensors on the device, in one copy that the host does not wait for."""
    flat, bounds = _flat(fields)
    sent = _host(flat, device).to(device, non_blocking=True)
    return [sent[begin:end] for begin, end in bounds]


def restage(buffer: Tensor, fields: Sequence[list[int]]) -> None:
    """As `stage`, into a buffer laid out by `layout` that stays where it is."""
    flat, _ = _flat(fields)
    buffer.copy_(_host(flat, buffer.device), non_blocking=True)


def layout(sizes: Sequence[int], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """A buffer for fields of these sizes, and the fields, views of it."""
    flat, bounds = _flat([[0] * size for size in sizes])
    buffer = torch.zeros(len(flat), dtype=torch.int32, device=device)
    return buffer, [buffer[begin:end] for begin, end in bounds]


def select(x_TD: Tensor, rows: list[int]) -> Tensor:
    """Some rows of a tensor, without a wait for the device."""
    return x_TD.index_select(0, stage([rows], x_TD.device)[0])


def _flat(fields: Sequence[list[int]]) -> tuple[list[int], list[tuple[int, int]]]:
    flat: list[int] = []
    bounds = []
    for field in fields:
        bounds.append((len(flat), len(flat) + len(field)))
        # Triton compiles another kernel for pointers that are not 16-byte aligned.
        flat += field + [0] * (-len(field) % 4)
    return flat, bounds


def _host(flat: list[int], device: torch.device) -> Tensor:
    # From pinned memory the copy runs behind the host's back; the allocator keeps the memory until it is done.
    return torch.tensor(flat, dtype=torch.int32, pin_memory=device.type == "cuda")


def bucket_of_blocks(parts: Sequence[Part], smallest: int = 1024 // BLOCK_SIZE) -> int:
    """Width of table that holds all parts: a power of two, so that few passes differ in it."""
    width = max(blocks_for(part.start + len(part.ids)) for part in parts)
    return max(smallest, 1 << (width - 1).bit_length())
