"""Checks of test_kernels that need Triton's interpreter; prints a line for each that holds.

Letters: B sequences, T packed query tokens, H heads, D key size, E value size, S slots.
"""

import os
import traceback
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hispec.attention import attention
from hispec.decode import kernels

SIZES = [64, 80, 96, 128, 256]
# Where Triton does not interpret, these checks need a GPU; the reference is computed on the CPU in any case.
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


class Case(NamedTuple):
    """A pool with shuffled pages, and the queries of a ragged pass over it."""

    q_HTD: Tensor
    keys_SHD: Tensor
    values_SHE: Tensor
    positions_T: Tensor
    row_starts_B1: Tensor
    tables_BN: Tensor
    lengths: list[int]
    rows: list[int]


def case(
    lengths: Sequence[int],
    rows: Sequence[int],
    heads: tuple[int, int] = (4, 2),
    sizes: tuple[int, int] = (64, 64),
    width: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Sequences of `lengths` tokens, of which the last `rows` are queries; `heads`: query and KV heads."""
    generator = torch.Generator().manual_seed(sum(lengths))
    width = width or max(-(-n // 16) for n in lengths)
    n_blocks = len(lengths) * width + 3
    keys, values = (torch.randn(n_blocks * 16, heads[1], size, generator=generator).to(dtype) for size in sizes)
    tables = torch.randperm(n_blocks, generator=generator)[: len(lengths) * width].view(len(lengths), width)
    q_THD = torch.randn(sum(rows), heads[0], sizes[0], generator=generator).to(dtype)
    positions = torch.cat([torch.arange(n - r, n) for n, r in zip(lengths, rows, strict=True)])
    starts = torch.tensor([0, *accumulate(rows)])
    return Case(
        q_THD.transpose(0, 1), keys, values, positions.int(), starts.int(), tables.int(), list(lengths), list(rows)
    )


def launch(kernel: Any, *arguments: Any) -> None:
    kernel(*(x.to(DEVICE) if isinstance(x, Tensor) else x for x in arguments))


def got(it: Case, window: int | None = None, cap: float | None = None, chosen: Sequence[int] | None = None) -> Tensor:
    """What the kernels give, [T, H, E]; rows that nothing was written to are NaN."""
    chosen = range(len(it.lengths)) if chosen is None else chosen
    out_THE = it.q_HTD.new_full((it.q_HTD.shape[1], it.q_HTD.shape[0], it.values_SHE.shape[2]), float("nan"))
    out_THE = out_THE.to(DEVICE)
    launch(
        kernels.attend, *it[:6], torch.tensor(list(chosen), dtype=torch.int32), max(it.rows[b] for b in chosen),
        out_THE, it.q_HTD.shape[2] ** -0.5, window, cap,
    )  # fmt: skip
    return out_THE.cpu()


def wanted(it: Case, window: int | None = None, cap: float | None = None) -> Tensor:
    """The same, sequence by sequence, over gathered keys, in fp32."""
    parts = []
    for b, length in enumerate(it.lengths):
        slots = torch.cat([torch.arange(16) + 16 * int(block) for block in it.tables_BN[b]])[:length]
        keys, values = (stored[slots].float().transpose(0, 1) for stored in (it.keys_SHD, it.values_SHE))
        q_HQD = it.q_HTD[:, it.row_starts_B1[b] : it.row_starts_B1[b + 1]].float()
        parts.append(attention(q_HQD, keys, values, it.q_HTD.shape[2] ** -0.5, window, cap).transpose(0, 1))
    return torch.cat(parts)


def check(it: Case, window: int | None = None, cap: float | None = None) -> None:
    tolerance = TOLERANCE[it.q_HTD.dtype]
    torch.testing.assert_close(got(it, window, cap).float(), wanted(it, window, cap), rtol=tolerance, atol=tolerance)


def heads() -> None:
    for query, kv in ((4, 4), (8, 2), (6, 1), (3, 3)):
        check(case([40, 300, 16], [1, 5, 3], (query, kv)))
        check(case([40, 77], [40, 20], (query, kv)))


def sizes() -> None:
    for size in SIZES:
        for dtype in (torch.float32, torch.float16 if DEVICE == "cpu" else torch.bfloat16):
            check(case([21, 290], [2, 3], sizes=(size, size), dtype=dtype))
            check(case([33, 50], [33, 18], sizes=(size, size), dtype=dtype))
    check(case([21, 290], [2, 3], sizes=(96, 64)))
    check(case([33, 50], [33, 18], sizes=(80, 128)))


def edges() -> None:
    for length in (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 512, 513):
        check(case([length, 300], [1, 1]))
        check(case([length, 20], [length if length < 100 else 30, 17]))


def windows() -> None:
    for window in (1, 8, 16, 60, 257, 600):
        check(case([40, 577, 300], [1, 5, 3]), window)
        check(case([40, 100], [40, 30]), window)
    check(case([40, 577, 300], [1, 5, 3]), None, 20.0)
    check(case([40, 577, 300], [1, 5, 3]), 290, 5.0)
    check(case([40, 100], [40, 30]), 17, 5.0)


def splits() -> None:
    """Cut or whole, the same numbers; and cut, the very same, whatever stands beside a sequence."""
    short, long = case([200, 130], [3, 2]), case([200, 130], [3, 2], width=64)
    long.tables_BN[:, : short.tables_BN.shape[1]] = short.tables_BN
    long = long._replace(keys_SHD=short.keys_SHD, values_SHE=short.values_SHE, q_HTD=short.q_HTD)
    torch.testing.assert_close(got(short), got(long), rtol=1e-6, atol=1e-6, msg="one split is the whole")
    beside = case([700, 300, 40], [3, 2, 1])
    alone = got(beside, chosen=[1])
    assert torch.equal(got(beside)[3:5], alone[3:5])
    assert alone[:3].isnan().all() and alone[5:].isnan().all(), "only the chosen sequences are attended for"
    wide = beside._replace(tables_BN=torch.nn.functional.pad(beside.tables_BN, (0, 80)))
    assert torch.equal(got(wide), got(beside)), "the width of the table does not matter"
    whole = case([700, 300], [17, 17])  # so many rows are not cut
    few = whole._replace(rows=[9, 9])
    few = few._replace(
        q_HTD=torch.cat([whole.q_HTD[:, 8:17], whole.q_HTD[:, 25:]], 1),
        positions_T=torch.cat([whole.positions_T[8:17], whole.positions_T[25:]]),
        row_starts_B1=torch.tensor([0, 9, 18], dtype=torch.int32),
    )
    out = got(whole)
    torch.testing.assert_close(got(few), torch.cat([out[8:17], out[25:]]), rtol=1e-5, atol=1e-5)


def padding() -> None:
    """Padding at position -1 sees nothing, yields zeros and disturbs nobody; NaN elsewhere in the pool neither."""
    for width in (4, 64):
        it = case([40, 9], [3, 3], width=width)
        clean = got(it)
        it.positions_T[[2, 3, 4, 5]] = -1
        free = torch.ones(len(it.keys_SHD), dtype=torch.bool)
        free[torch.cat([torch.arange(16) + 16 * int(block) for block in it.tables_BN[0]])[:39]] = False
        it.keys_SHD[free] = float("nan")
        it.values_SHE[free] = float("nan")
        padded = got(it)
        assert torch.equal(padded[:2], clean[:2])
        assert torch.equal(padded[2:], torch.zeros_like(padded[2:]))


def offsets() -> None:
    """A pool of more than 2**31 elements: only a few pages of it are ever touched."""
    n_slots = 16 * 1_100_000
    keys, values = (torch.empty(n_slots, 2, 64, dtype=torch.float16, device=DEVICE) for _ in range(2))
    assert keys.numel() > 2**31
    it = case([40], [2], dtype=torch.float16)
    far = it._replace(keys_SHD=keys, values_SHE=values, tables_BN=it.tables_BN + 1_099_000)
    for block in it.tables_BN[0].tolist():
        here, there = (slice(16 * b, 16 * b + 16) for b in (block, block + 1_099_000))
        keys[there], values[there] = it.keys_SHD[here].to(DEVICE), it.values_SHE[here].to(DEVICE)
    assert torch.equal(got(far), got(it))
    k_HTD = torch.randn(2, 1, 64).half()
    at = [torch.tensor([20], dtype=torch.int32), torch.zeros(1, dtype=torch.int32), far.tables_BN]
    launch(kernels.write, keys, values, k_HTD, k_HTD, *at, n_slots - 16)
    assert torch.equal(keys[int(far.tables_BN[0, 1]) * 16 + 4].cpu(), k_HTD[:, 0])


def write() -> None:
    """Every token's keys and values in its slot, padding in the trash, nothing else touched."""
    for kv_heads, key_size, value_size in ((2, 64, 64), (3, 80, 80), (5, 96, 64), (32, 128, 128), (1, 256, 256)):
        keys, values = torch.zeros(16 * 9, kv_heads, key_size), torch.zeros(16 * 9, kv_heads, value_size)
        # As projections give them: [T, H, D] seen as [H, T, D].
        k_HTD, v_HTE = (torch.randn(7, kv_heads, size).transpose(0, 1) for size in (key_size, value_size))
        tables = torch.tensor([[7, 2, 5], [1, 4, 0]], dtype=torch.int32)
        positions = torch.tensor([15, 16, 17, -1, 33, 0, -1], dtype=torch.int32)
        owners = torch.tensor([0, 0, 0, 0, 1, 1, 1], dtype=torch.int32)
        stored_all = [x.to(DEVICE) for x in (keys, values)]
        launch(kernels.write, *stored_all, k_HTD, v_HTE, positions, owners, tables, 8 * 16)
        slots = torch.tensor([7 * 16 + 15, 2 * 16, 2 * 16 + 1, 0 * 16 + 1, 1 * 16])
        for stored, given in zip((x.cpu() for x in stored_all), (k_HTD, v_HTE), strict=True):
            expected = torch.zeros_like(stored)
            expected[slots] = given.transpose(0, 1)[[0, 1, 2, 4, 5]]
            trash = stored[8 * 16].clone()
            stored[8 * 16] = 0
            assert torch.equal(stored, expected)
            assert ((trash == given[:, 3]) | (trash == given[:, 6])).all()


CHECKS = (heads, sizes, edges, windows, splits, padding, offsets, write)

if __name__ == "__main__":
    torch.set_num_threads(1)
    for check_ in CHECKS:
        try:
            check_()
            print(f"{check_.__name__}: as wanted")
        except Exception:  # the others are still worth knowing
            traceback.print_exc()
