"""What is asked of the decoder and what it answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from hispec.config import Config

FinishReason = Literal["stop", "length", "abort", "error"]

# Below this temperature sampling is arg-max in any case; dividing by it would only overflow.
GREEDY_BELOW = 1e-5
# In `chosen_by`, instead of a level.
LOOKED_UP = -1
# The bias that forbids a token instead of making it unlikely.
BANNED = -100.0


_NO_BEAMS = "beam search is not offered: verification follows one continuation; use n=... with a temperature"
_NO_STATE = "not offered: it is not a rule on one position's logits and the tokens before it"


class SamplingParams(Config):
    """How one prompt is to be continued."""

    refused: ClassVar[Mapping[str, str]] = {
        "num_beams": _NO_BEAMS,
        "beam_width": _NO_BEAMS,
        "use_beam_search": _NO_BEAMS,
        "best_of": "not offered: ask for n=... with logprobs=0 and choose among them",
        "penalty_alpha": f"contrastive search is {_NO_STATE}",
        "guidance_scale": f"classifier-free guidance is {_NO_STATE}",
        "mirostat": f"mirostat is {_NO_STATE}",
        "logits_processor": f"one's own processor is {_NO_STATE} that can be checked; use logit_bias or a penalty",
        "typical_p": "not offered; use top_p or min_p",
        "no_repeat_ngram_size": "not offered; use repetition_penalty or frequency_penalty",
        "prompt_logprobs": "not offered; logprobs=K covers generated tokens",
        "max_tokens": "it is called max_new_tokens here",
        "min_tokens": "it is called min_new_tokens here",
        "stop_token_ids": "it is called stop_ids here",
    }

    temperature: float = Field(default=0.0, ge=0.0, le=100.0)
    """0 (or anything below 1e-5) is greedy; 1 samples the model's own distribution."""
    top_k: int = Field(default=0, ge=0)
    """Sample among the k likeliest tokens only; 0 is off."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample among the likeliest tokens that together have this probability; 1 is off."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Sample among tokens at least this fraction as likely as the likeliest one; 0 is off."""
    seed: int | None = Field(default=None, ge=0)
    """Same seed, same output; null draws one. With n > 1 the further continuations take seed + 1, seed + 2, ..."""
    n: int = Field(default=1, ge=1)
    """Continuations of the same prompt."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Most tokens to generate."""
    min_new_tokens: int = Field(default=0, ge=0)
    """Nothing ends the text before this many tokens: stop ids cannot be chosen, stop strings are not looked for."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Strings that end the text; not part of it."""
    stop_ids: list[int] = Field(default_factory=list)
    """Token ids that end the text, besides the model's own."""
    ignore_eos: bool = False
    """Go on past the model's own stop tokens, to max_new_tokens."""
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=10.0)
    """Divide positive logits of tokens in prompt or text by this, multiply negative ones; 1 is off."""
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    """Subtract this from the logits of tokens the text has already; 0 is off."""
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    """Subtract this once for every time the text has the token already; 0 is off."""
    logit_bias: dict[int, Annotated[float, Field(ge=BANNED, le=100.0)]] = Field(default_factory=dict)
    """Add to the logits of these token ids, {id: bias}; -100 forbids the token."""
    logprobs: int | None = Field(default=None, ge=0, le=20)
    """Give each token's log-probability under the full model, before any of these options, and the k likeliest ones."""
    rule: Literal["coupled", "rejection"] = "coupled"
    """When sampling: coupled gives exactly what plain sampling gives for the seed; rejection accepts a little more."""

    @field_validator("stop", mode="before")
    @classmethod
    def _one_string(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens={self.min_new_tokens} is above max_new_tokens={self.max_new_tokens}")
        if self.n > 1 and self.greedy:
            raise ValueError(f"n={self.n} with temperature=0 is the same text {self.n} times; set a temperature")
        return self

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before anything is taken from them."""
        return bool(
            self.logit_bias
            or self.min_new_tokens
            or self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
        )


@dataclass(frozen=True)
class Completion:
    """One finished text.

    `ids` are the generated tokens, the stop token included; `text` is their decoding without special tokens, cut before
    the stop string if one ended it. `finish_reason`: stop (a stop id or string), length (max_new_tokens), abort
    (cancelled), error (`error` says why; what was generated before is there). `logprobs`: per token, token ids to
    log-probabilities, its own first. `chosen_by`: per token, the level whose choice it is, 0 the draft's, or -1: it
    was looked up in the text. Every level that judged it let it stand, so only the last level's own tokens were chosen
    by the full model alone.
    """

    index: int
    prompt_ids: list[int]
    ids: list[int]
    text: str
    finish_reason: FinishReason
    choice: int = 0
    logprobs: list[dict[int, float]] | None = None
    error: str | None = None
    chosen_by: list[int] = field(default_factory=list)
