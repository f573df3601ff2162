"""Paged KV storage, the bookkeeping: which fixed-size pages of the pool belong to which sequence.

pool      [ 0 ][ 1 ][ 2 ][ 3 ][ 4 ][ 5 ]          block = page of BLOCK_SIZE slots
table A     0    1                                  A's token 17 lies in block 1, slot 1 of it
table B               2         5                   a table need not be contiguous
"""

import bisect

from hispec.errors import CapacityError

BLOCK_SIZE = 16


class BlockPool:
    """Hands out blocks and takes them back; neighbours where it can, since those are read without gathering."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._free = list(range(n_blocks))

    @property
    def n_free(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """Take `n` blocks.

        Raises:
            CapacityError: fewer are free.
        """
        if n > len(self._free):
            raise CapacityError(
                f"KV pool: {n} blocks wanted, {len(self._free)} of {self.n_blocks} are free; raise kv_blocks"
            )
        start = next((i for i in range(len(self._free) - n + 1) if self._free[i + n - 1] - self._free[i] == n - 1), 0)
        taken = self._free[start : start + n]
        del self._free[start : start + n]
        return taken

    def free(self, blocks: list[int]) -> None:
        """Give blocks back."""
        for block in blocks:
            at = bisect.bisect_left(self._free, block)
            assert at == len(self._free) or self._free[at] != block, f"block {block} was free already"
            self._free.insert(at, block)


def blocks_for(n_tokens: int) -> int:
    """Blocks that hold `n_tokens`."""
    return -(-n_tokens // BLOCK_SIZE)


def slots(table: list[int], start: int, stop: int) -> list[int]:
    """Pool slots of a sequence's tokens [start, stop)."""
    return [table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(start, stop)]


def is_contiguous(table: list[int]) -> bool:
    """Whether the table's blocks are neighbours in the pool."""
    return table[-1] - table[0] == len(table) - 1 and all(b - a == 1 for a, b in zip(table, table[1:], strict=False))
