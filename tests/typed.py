"""A command as a user types it."""

import sys
from collections.abc import Callable

import pytest


class Typed:
    """Types a command's words at it, and holds what it answered."""

    def __init__(
        self, name: str, main: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.name, self.main, self.monkeypatch, self.capsys = name, main, monkeypatch, capsys

    def __call__(self, *words: object) -> str:
        self.capsys.readouterr()
        self.monkeypatch.setattr(sys, "argv", [self.name, *map(str, words)])
        self.main()
        out, self.err = self.capsys.readouterr()
        return out

    def refused(self, *words: object) -> str:
        """The one line with which it refuses."""
        with pytest.raises(SystemExit) as caught:
            self(*words)
        out, err = self.capsys.readouterr()
        assert caught.value.code == 2 and out == ""
        assert err.startswith("error: ") and err.count("\n") == 1, err
        return str(err)
