"""Token ids to text as they arrive: characters are never split, and what may become a stop string is held back."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"


class TextStream:
    """The text of one sequence, grown token by token."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
        eager: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`eager`: decode at every token (streaming); without it and stop strings, decoding waits for the end.

        `min_tokens`: before so many, stop strings are not looked for.
        """
        self.tokenizer = tokenizer
        self.stop = list(stop)
        self.min_tokens = min_tokens
        self.ids: list[int] = []
        self._eager = eager or bool(stop)
        # Tokens before `_done` are decoded for good; those from `_context` on are decoded again to see what they add,
        # since a tokenizer may write a token differently (a space, half a character) after others.
        self._context = self._done = 0
        self._text = ""
        self._shown = 0
        self.stopped = False

    def push(self, token: int) -> bool:
        """Add a token; True when a stop string is complete."""
        self.ids.append(token)
        if not self._eager:
            return False
        before = self._decode(self._context, self._done)
        after = self._decode(self._context, len(self.ids))
        if len(after) > len(before) and not after.endswith(REPLACEMENT):
            self._append(after[len(before) :])
            self._context, self._done = self._done, len(self.ids)
        return self.stopped

    def take(self, final: bool = False) -> str:
        """Text that is certain and was not taken yet; `final`: no token will follow, so all of it is."""
        held = 0 if final or self.stopped else max((_overlap(self._text, stop) for stop in self.stop), default=0)
        end = max(len(self._text) - held, self._shown)
        taken, self._shown = self._text[self._shown : end], end
        return taken

    def finish(self) -> str:
        """The whole text, once no token will follow."""
        if not self.stopped:
            self._append(self._decode(0, len(self.ids))[len(self._text) :])
        return self._text

    def _append(self, piece: str) -> None:
        # A stop string may begin in text that is already here, or lie anywhere in the piece.
        longest = max((len(stop) for stop in self.stop), default=1)
        start = max(0, len(self._text) - longest + 1)
        self._text += piece
        if len(self.ids) < self.min_tokens:
            return
        found = [at for stop in self.stop if (at := self._text.find(stop, start)) >= 0]
        if found:
            self._text = self._text[: min(found)]
            self.stopped = True

    def _decode(self, start: int, stop: int) -> str:
        ids = self.ids[start:stop]
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
