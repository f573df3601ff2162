"""Ctrl-C and SIGTERM during training: finish the step, save, and say how to go on."""

import signal
from types import FrameType, TracebackType
from typing import Any, Self

from hispec.train import ranks


class Stop:
    """While entered, notes the first signal. A second Ctrl-C interrupts at once, if there is but one rank: to several,
    terminal and launcher pass on the same one in turn.

    Attributes:
        code: the exit code that belongs to the signal (130 or 143), 0 before one came.
    """

    def __init__(self) -> None:
        self.code = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.code and number == signal.SIGINT and ranks.world() == 1:
            raise KeyboardInterrupt
        self.code = self.code or 128 + number

    def after(self, step: int) -> int:
        """Exit code with which to stop after `step`; 0 to go on."""
        return self.code
