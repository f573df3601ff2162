"""Paged KV storage, the bookkeeping: which fixed-size pages of the pool belong to which sequence.

pool      [ 0 ][ 1 ][ 2 ][ 3 ][ 4 ][ 5 ]          block = page of BLOCK_SIZE slots
table A     0    1                                  A's token 17 lies in block 1, slot 1 of it
table B     0         2         5                   a table need not be contiguous; A and B begin with the same
                                                    16 tokens and share block 0

A full block whose tokens are committed and have been through every layer is remembered by what it holds, and stays so
when its last user leaves, until the pool needs the room: later sequences that begin the same way start behind it.
"""

import bisect
from collections.abc import Sequence

from hispec.errors import CapacityError

BLOCK_SIZE = 16

# What a block holds: the block before it (by serial number, 0 is none) and its own tokens. Compared whole, not hashed
# down, so two different prefixes are never mistaken for each other.
Key = tuple[int, tuple[int, ...]]


class BlockPool:
    """Hands out blocks, counts their users and takes them back; neighbours where it can, since those are read without
    gathering.

    Attributes:
        n_blocks: size of the pool.
    """

    def __init__(self, n_blocks: int, remembers: bool = True) -> None:
        self.n_blocks, self.remembers = n_blocks, remembers
        self._users = [0] * n_blocks
        self._blank = list(range(n_blocks))  # free, and nothing worth remembering in them; in order
        self._idle: dict[int, None] = {}  # free, but remembered; longest unused first
        self._block_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._serials: dict[int, int] = {}
        self._serial = 0

    @property
    def n_free(self) -> int:
        return len(self._blank) + len(self._idle)

    def allocate(self, n: int, after: int | None = None) -> list[int]:
        """Take `n` blocks: those behind block `after`, if they are free, remembered or not; else rather blank ones.

        Raises:
            CapacityError: fewer are free.
        """
        if n > self.n_free:
            raise CapacityError(
                f"KV pool: {n} blocks wanted, {self.n_free} of {self.n_blocks} are free; raise kv_blocks"
            )
        behind = range(after + 1, after + 1 + n) if after is not None else range(0)
        if behind and behind.stop <= self.n_blocks and not any(self._users[block] for block in behind):
            for block in behind:
                if block in self._idle:
                    self._forget(block)
            start = bisect.bisect_left(self._blank, behind.start)
        else:
            while len(self._blank) < n:
                self._forget(next(iter(self._idle)))
            blank = self._blank
            start = next((i for i in range(len(blank) - n + 1) if blank[i + n - 1] - blank[i] == n - 1), 0)
        taken = self._blank[start : start + n]
        del self._blank[start : start + n]
        for block in taken:
            self._users[block] = 1
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back; those with other users stay theirs."""
        # Backwards: the end of a prefix is the first that may be forgotten.
        for block in reversed(blocks):
            assert self._users[block] > 0, f"block {block} was free already"
            self._users[block] -= 1
            if self._users[block] == 0:
                if block in self._key_of:
                    self._idle[block] = None
                else:
                    bisect.insort(self._blank, block)

    def remember(self, block: int, serial: int, tokens: Sequence[int]) -> int:
        """Note what a full, committed block holds: `tokens`, behind the block numbered `serial` (0: none).

        Returns its own serial number; that of another block, if one holds the same already.
        """
        key = (serial, tuple(tokens))
        if not self.remembers:
            return 0
        if key in self._block_of:
            return self._serials[self._block_of[key]]
        self._serial += 1
        self._block_of[key], self._key_of[block], self._serials[block] = block, key, self._serial
        return self._serial

    def serial_of(self, blocks: Sequence[int], root: int = 0) -> int:
        """Serial number of the last of some remembered blocks; without any, of what stands before the first."""
        return self._serials[blocks[-1]] if blocks else root

    def find(self, tokens: Sequence[int], root: int = 0) -> list[int]:
        """The remembered blocks that hold the beginning of `tokens`; `root`, 0 or less, tells kinds of blocks apart."""
        found: list[int] = []
        serial = root
        for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
            block = self._block_of.get((serial, tuple(tokens[start : start + BLOCK_SIZE])))
            if block is None:
                break
            found.append(block)
            serial = self._serials[block]
        return found

    def share(self, blocks: Sequence[int]) -> None:
        """Become a user of remembered blocks."""
        for block in blocks:
            self._users[block] += 1
            self._idle.pop(block, None)

    def _forget(self, block: int) -> None:
        del self._idle[block]
        del self._block_of[self._key_of.pop(block)], self._serials[block]
        bisect.insort(self._blank, block)


def blocks_for(n_tokens: int) -> int:
    """Blocks that hold `n_tokens`."""
    return -(-n_tokens // BLOCK_SIZE)


def slots(table: list[int], start: int, stop: int) -> list[int]:
    """Pool slots of a sequence's tokens [start, stop)."""
    return [table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(start, stop)]


def is_contiguous(table: list[int]) -> bool:
    """Whether the table's blocks are neighbours in the pool."""
    return table[-1] - table[0] == len(table) - 1 and all(b - a == 1 for a, b in zip(table, table[1:], strict=False))
