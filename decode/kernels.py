"""The Triton kernels: attention over paged keys and values, and the write of a pass's own into their slots.

Imported only where a pass runs on a GPU (or under Triton's interpreter); an install for the CPU has no triton.

    one program    rows (query token x head of the group) of one sequence and one KV head: a key is read once for all
    few rows       decoding: the keys are cut in splits of SPLIT, one program each, and a second kernel joins them;
                   the cut stands where the position says, so no row's numbers depend on the rest of the batch
    many rows      a prompt: one program walks all keys

Letters: B sequences, T packed query tokens, M rows of a program, H query heads, G of them per KV head, N keys of a
step, S slots of the pool, D key size, E value size.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hispec.decode.blocks import BLOCK_SIZE

# Keys of one split: 2,048 tokens of context and 8 KV heads make 64 programs, about half of a large GPU's processors.
SPLIT = 256
# Up to so many query tokens a sequence counts as decoding.
FEW_ROWS = 16
_STEP_BYTES = 16384


_COUNTS = ["window", "max_rows", "n_splits", "table_width"]  # change from pass to pass: not worth a compilation each


@triton.jit(do_not_specialize=_COUNTS)
def attend_kernel(
    out, part, part_max, part_sum, q, keys, values, positions, row_starts, tables, chosen,
    scale, cap, window, max_rows, n_splits, q_head, q_token, table_width,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Rows against all their keys (SPLIT 0: to `out`), or against one split of them (to the partial results)."""
    member = tl.program_id(2)
    kv_head = tl.program_id(1)
    sequence = tl.load(chosen + member)
    first = tl.load(row_starts + sequence)
    n_rows = tl.load(row_starts + sequence + 1) - first
    block = tl.program_id(0) // n_splits
    split = tl.program_id(0) % n_splits

    row_M = block * BLOCK_M + tl.arange(0, BLOCK_M)
    token_M = row_M // GROUP
    head_M = kv_head * GROUP + row_M % GROUP
    real_M = token_M < n_rows
    # A row that pads a pass stands at -1 and sees nothing.
    position_M = tl.load(positions + first + token_M, mask=real_M, other=-1)
    stop = tl.max(position_M, 0) + 1
    begin = 0
    if SPLIT > 0:
        begin = split * SPLIT
        stop = tl.minimum(stop, begin + SPLIT)
    if WINDOWED:
        lowest = tl.min(tl.where(position_M >= 0, position_M, 2147483647), 0) - window + 1
        begin = tl.maximum(begin, lowest // BLOCK_N * BLOCK_N)
    if SPLIT > 0:
        if begin >= stop:
            return  # no row of these looks at this split

    d = tl.arange(0, KEY_PAD)
    e = tl.arange(0, VALUE_PAD)
    q_at = (first + token_M).to(tl.int64)[:, None] * q_token + head_M[:, None] * q_head + d[None, :]
    q_MD = tl.load(q + q_at, mask=real_M[:, None] & (d < KEY_SIZE)[None, :], other=0.0).to(keys.dtype.element_ty)
    acc_ME = tl.zeros([BLOCK_M, VALUE_PAD], tl.float32)
    max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    table = tables + sequence.to(tl.int64) * table_width
    for start in range(begin, stop, BLOCK_N):
        key_N = start + tl.arange(0, BLOCK_N)
        there_N = key_N < stop
        page_N = tl.load(table + key_N // PAGE, mask=there_N, other=0)
        slot_N = (page_N.to(tl.int64) * PAGE + key_N % PAGE) * KV_HEADS + kv_head
        k_DN = tl.load(
            keys + slot_N[None, :] * KEY_SIZE + d[:, None], mask=there_N[None, :] & (d < KEY_SIZE)[:, None], other=0.0
        )
        score_MN = tl.dot(q_MD, k_DN, input_precision="ieee") * scale
        if CAPPED:
            score_MN = cap * (1.0 - 2.0 / (tl.exp(2.0 * score_MN / cap) + 1.0))  # cap * tanh(score / cap)
        seen_MN = key_N[None, :] <= position_M[:, None]
        if WINDOWED:
            seen_MN = seen_MN & (key_N[None, :] > position_M[:, None] - window)
        score_MN = tl.where(seen_MN, score_MN, float("-inf"))
        new_M = tl.maximum(max_M, tl.max(score_MN, 1))
        base_M = tl.where(new_M == float("-inf"), 0.0, new_M)  # a row that has seen nothing yet
        weight_MN = tl.exp(score_MN - base_M[:, None])
        shrink_M = tl.exp(max_M - base_M)
        sum_M = sum_M * shrink_M + tl.sum(weight_MN, 1)
        max_M = new_M
        v_NE = tl.load(
            values + slot_N[:, None] * VALUE_SIZE + e[None, :],
            mask=there_N[:, None] & (e < VALUE_SIZE)[None, :], other=0.0,
        )  # fmt: skip
        acc_ME = acc_ME * shrink_M[:, None] + tl.dot(weight_MN.to(v_NE.dtype), v_NE, input_precision="ieee")

    stored_ME = real_M[:, None] & (e < VALUE_SIZE)[None, :]
    if SPLIT > 0:
        at_M = ((member * max_rows + token_M).to(tl.int64) * (KV_HEADS * GROUP) + head_M) * n_splits + split
        tl.store(part + at_M[:, None] * VALUE_SIZE + e[None, :], acc_ME, mask=stored_ME)
        tl.store(part_max + at_M, max_M, mask=real_M)
        tl.store(part_sum + at_M, sum_M, mask=real_M)
    else:
        at_M = (first + token_M).to(tl.int64) * (KV_HEADS * GROUP) + head_M
        out_ME = acc_ME / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]
        tl.store(out + at_M[:, None] * VALUE_SIZE + e[None, :], out_ME.to(out.dtype.element_ty), mask=stored_ME)


@triton.jit(do_not_specialize=_COUNTS)
def join_kernel(
    out, part, part_max, part_sum, positions, row_starts, chosen, window, max_rows, n_splits,
    HEADS: tl.constexpr, VALUE_SIZE: tl.constexpr, VALUE_PAD: tl.constexpr, SPLIT: tl.constexpr, CHUNK: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """One row and head: what its splits found, weighed and added, always in the same order."""
    member = tl.program_id(0) // max_rows
    token = tl.program_id(0) % max_rows
    head = tl.program_id(1)
    sequence = tl.load(chosen + member)
    first = tl.load(row_starts + sequence)
    if token < tl.load(row_starts + sequence + 1) - first:
        position = tl.load(positions + first + token)
        begin = 0
        if WINDOWED:
            begin = tl.maximum(position - window + 1, 0) // SPLIT
        stop = (position + SPLIT) // SPLIT  # splits up to the row's own; none at position -1
        at = ((member * max_rows + token).to(tl.int64) * HEADS + head) * n_splits
        top = float("-inf")
        for start in range(begin, stop, CHUNK):
            split_C = start + tl.arange(0, CHUNK)
            top = tl.maximum(top, tl.max(tl.load(part_max + at + split_C, mask=split_C < stop, other=float("-inf")), 0))
        e = tl.arange(0, VALUE_PAD)
        acc_E = tl.zeros([VALUE_PAD], tl.float32)
        total = 0.0
        for start in range(begin, stop, CHUNK):
            split_C = start + tl.arange(0, CHUNK)
            there_C = split_C < stop
            weight_C = tl.exp(tl.load(part_max + at + split_C, mask=there_C, other=float("-inf")) - top)
            total += tl.sum(weight_C * tl.load(part_sum + at + split_C, mask=there_C, other=0.0), 0)
            part_CE = tl.load(
                part + (at + split_C)[:, None] * VALUE_SIZE + e[None, :],
                mask=there_C[:, None] & (e < VALUE_SIZE)[None, :], other=0.0,
            )  # fmt: skip
            acc_E += tl.sum(weight_C[:, None] * part_CE, 0)
        out_E = acc_E / tl.where(total == 0.0, 1.0, total)
        out_at = ((first + token).to(tl.int64) * HEADS + head) * VALUE_SIZE
        tl.store(out + out_at + e, out_E.to(out.dtype.element_ty), mask=e < VALUE_SIZE)


@triton.jit(do_not_specialize=["trash", "table_width"])
def write_kernel(
    keys, values, k, v, positions, owners, tables, trash, k_head, k_token, v_head, v_token, table_width,
    KV_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One token's keys and values, some heads of them, to its slot; those of a padding row to the slot `trash`."""
    token = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    position = tl.load(positions + token)
    table = tables + tl.load(owners + token).to(tl.int64) * table_width
    page = tl.load(table + position // PAGE, mask=position >= 0, other=0)
    slot = tl.where(position >= 0, page.to(tl.int64) * PAGE + position % PAGE, trash)
    d = tl.arange(0, KEY_PAD)
    e = tl.arange(0, VALUE_PAD)
    k_ok = (head < KV_HEADS)[:, None] & (d < KEY_SIZE)[None, :]
    v_ok = (head < KV_HEADS)[:, None] & (e < VALUE_SIZE)[None, :]
    k_HD = tl.load(k + token.to(tl.int64) * k_token + head[:, None] * k_head + d[None, :], mask=k_ok, other=0.0)
    v_HE = tl.load(v + token.to(tl.int64) * v_token + head[:, None] * v_head + e[None, :], mask=v_ok, other=0.0)
    row_H = slot * KV_HEADS + head
    tl.store(keys + row_H[:, None] * KEY_SIZE + d[None, :], k_HD.to(keys.dtype.element_ty), mask=k_ok)
    tl.store(values + row_H[:, None] * VALUE_SIZE + e[None, :], v_HE.to(values.dtype.element_ty), mask=v_ok)


def attend(
    q_HTD: Tensor,
    keys_SHD: Tensor,
    values_SHE: Tensor,
    positions_T: Tensor,
    row_starts_B1: Tensor,
    tables_BN: Tensor,
    chosen_C: Tensor,
    max_rows: int,
    out_THE: Tensor,
    scale: float,
    window: int | None,
    cap: float | None,
) -> None:
    """Attend for the sequences `chosen_C`, each with `max_rows` query tokens at most; fills their rows of `out_THE`.

    `positions_T`: each query token's place in its sequence, -1 for padding. `row_starts_B1`: where each sequence's
    tokens begin. `tables_BN`: its blocks, as many as its last position needs. All index tensors are int32.
    """
    n_heads = q_HTD.shape[0]
    kv_heads, key_size = keys_SHD.shape[1:]
    value_size, group = values_SHE.shape[2], n_heads // kv_heads
    width = tables_BN.shape[1]
    few = max_rows <= FEW_ROWS and width * BLOCK_SIZE > SPLIT
    n_splits = triton.cdiv(width * BLOCK_SIZE, SPLIT) if few else 1
    part = stats = out_THE  # not used unless there are splits
    if few:
        part = q_HTD.new_empty(len(chosen_C) * max_rows, n_heads, n_splits, value_size, dtype=torch.float32)
        stats = q_HTD.new_empty(2, len(chosen_C) * max_rows, n_heads, n_splits, dtype=torch.float32)
    sizes = tiles(max_rows * group, key_size, value_size, keys_SHD.element_size())
    attend_kernel[(triton.cdiv(max_rows * group, sizes["BLOCK_M"]) * n_splits, kv_heads, len(chosen_C))](
        out_THE, part, stats[0], stats[-1], q_HTD, keys_SHD, values_SHE, positions_T, row_starts_B1, tables_BN,
        chosen_C, scale, cap or 1.0, window or 0, max_rows, n_splits, q_HTD.stride(0), q_HTD.stride(1), width,
        KV_HEADS=kv_heads, GROUP=group, KEY_SIZE=key_size, VALUE_SIZE=value_size, PAGE=BLOCK_SIZE,
        SPLIT=SPLIT if few else 0, CAPPED=cap is not None, WINDOWED=window is not None, **sizes,
    )  # fmt: skip
    if few:
        join_kernel[(len(chosen_C) * max_rows, n_heads)](
            out_THE, part, stats[0], stats[1], positions_T, row_starts_B1, chosen_C, window or 0, max_rows, n_splits,
            HEADS=n_heads, VALUE_SIZE=value_size, VALUE_PAD=sizes["VALUE_PAD"], SPLIT=SPLIT, CHUNK=16,
            WINDOWED=window is not None,
        )  # fmt: skip


def write(
    keys_SHD: Tensor,
    values_SHE: Tensor,
    k_HTD: Tensor,
    v_HTE: Tensor,
    positions_T: Tensor,
    owners_T: Tensor,
    tables_BN: Tensor,
    trash: int,
) -> None:
    """Put the keys and values of a pass's tokens into their slots; `owners_T`: the sequence each token belongs to."""
    kv_heads, n_tokens, key_size = k_HTD.shape
    value_size = v_HTE.shape[2]
    key_pad, value_pad = triton.next_power_of_2(key_size), triton.next_power_of_2(value_size)
    block_h = min(triton.next_power_of_2(kv_heads), max(1, 2048 // max(key_pad, value_pad)))
    write_kernel[(n_tokens, triton.cdiv(kv_heads, block_h))](
        keys_SHD, values_SHE, k_HTD, v_HTE, positions_T, owners_T, tables_BN, trash,
        k_HTD.stride(0), k_HTD.stride(1), v_HTE.stride(0), v_HTE.stride(1), tables_BN.shape[1],
        KV_HEADS=kv_heads, KEY_SIZE=key_size, VALUE_SIZE=value_size, KEY_PAD=key_pad, VALUE_PAD=value_pad,
        PAGE=BLOCK_SIZE, BLOCK_H=block_h,
    )  # fmt: skip


def tiles(n_rows: int, key_size: int, value_size: int, element_size: int) -> dict[str, Any]:
    """Sizes of one program's step: all its rows up to 64, and keys of 16 KB, so that three steps fit an SM twice."""
    key_pad, value_pad = (max(16, triton.next_power_of_2(size)) for size in (key_size, value_size))
    keys = _STEP_BYTES // (max(key_pad, value_pad) * element_size)
    return {
        "KEY_PAD": key_pad,
        "VALUE_PAD": value_pad,
        "BLOCK_M": min(64, max(16, triton.next_power_of_2(n_rows))),
        "BLOCK_N": min(64, max(16, keys)),
        "num_warps": 4,
        "num_stages": 3,
    }
