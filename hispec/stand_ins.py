"""What stands in place of parts of a model while one span of it runs. The model's own forward walks past them.

Letters: T packed tokens, D hidden size.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast


class Skip:
    """Stands where a layer is not run: returns what it was given, answers attributes as the layer would."""

    def __init__(self, layer: nn.Module, tupled: bool) -> None:
        self._layer, self._tupled = layer, tupled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        return (hidden_states,) if self._tupled else hidden_states


class Run(Skip):
    """Stands where a layer is run: may put a hidden state in before it, keeps what came out of it."""

    entry: Tensor | None = None
    output: Any = None

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.entry is not None:
            hidden_states = self.entry
        result = self._layer(hidden_states, *args, **kwargs)
        self.output = result[0] if self._tupled else result
        return result


class Layers(nn.ModuleList):
    """The model's layer list; what walks it sees the stand-ins of the span being run."""

    walked: list[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter(self.walked) if self.walked is not None else super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        return self.walked[index] if self.walked is not None else super().__getitem__(index)


class _Output(BaseModelOutputWithPast):
    """A base model's output that holds nothing but the state: whatever else a wrapper hands on is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class Given(nn.Module):
    """Stands where the base model was: hands the language-model wrapper a hidden state."""

    hidden_1TD: Tensor

    @property
    def decoder(self) -> "Given":
        return self

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPast:
        return _Output(last_hidden_state=self.hidden_1TD)
