"""What is asked of the decoder and what it answers."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, field_validator

from hispec.config import Config

FinishReason = Literal["stop", "length"]

# Below this temperature sampling is arg-max in any case; dividing by it would only overflow.
GREEDY_BELOW = 1e-5


class SamplingParams(Config):
    """How one prompt is to be continued."""

    temperature: float = Field(default=0.0, ge=0.0, le=100.0)
    """0 (or anything below 1e-5) is greedy; 1 samples the model's own distribution."""
    top_k: int = Field(default=0, ge=0)
    """Sample among the k likeliest tokens only; 0 is off."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample among the likeliest tokens that together have this probability; 1 is off."""
    seed: int | None = Field(default=None, ge=0)
    """Same seed, same output; null draws one."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Most tokens to generate."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Strings that end the text; not part of it."""
    stop_ids: list[int] = Field(default_factory=list)
    """Token ids that end the text, besides the model's own."""
    ignore_eos: bool = False
    """Go on past the model's own stop tokens, to max_new_tokens."""
    rule: Literal["coupled", "rejection"] = "coupled"
    """When sampling: coupled gives exactly what plain sampling gives for the seed; rejection accepts a little more."""

    @field_validator("stop", mode="before")
    @classmethod
    def _one_string(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True)
class Completion:
    """One finished text.

    `ids` are the generated tokens, the stop token included; `text` is their decoding without special tokens, cut before
    the stop string if one ended it.
    """

    index: int
    prompt_ids: list[int]
    ids: list[int]
    text: str
    finish_reason: FinishReason
