"""What heads learn from: the settings under `data`."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from hispec.config import Config

Answers = Literal["given", "trunk"]


class SourceConfig(Config):
    """One place that rows come from."""

    path: str
    """JSON, JSONL, Parquet or text file, glob, folder, or the Hub id (org/name) of a data set."""
    split: str = "train"
    """Of a data set."""
    name: str | None = None
    """Configuration of a data set that has several."""
    revision: str | None = None
    """Of a data set."""
    streaming: bool = False
    """Read a data set row by row from the Hub, without downloading it whole; best with rows=N."""
    rows: int | None = Field(default=None, ge=1)
    """Take the first so many rows; null takes all."""
    weight: float = Field(default=1.0, gt=0.0)
    """How often each row is seen in an epoch: 2 is twice, 0.5 every other row."""


class DataConfig(Config):
    """What the heads learn from."""

    source: list[SourceConfig] = Field(default_factory=list)
    """One or several places; a path alone will do. Rows hold `messages`, `conversations`, `prompt` (and `completion`),
    `text`, or `input_ids` with `loss_mask` or `labels`."""
    prompts: str | None = None
    """Name of a packaged prompt list (everyday), whose prompts the trunk answers."""
    max_prompts: int | None = Field(default=None, ge=1)
    """Take this many of the packaged prompts; null takes all."""
    own_prompts: int = Field(default=0, ge=0)
    """Let the trunk write this many prompts itself, which it then answers: as varied as what it was taught on, and no
    data set is needed. Those without an end, or there already, are left out."""
    stdlib_prompts: int = Field(default=0, ge=0)
    """Functions of the running Python's own library, up to their docstrings, that the trunk is to complete; there are
    about 900."""
    stdlib_tokens: int = Field(default=0, ge=0)
    """Tokens of text to take from the running Python's own library and its documentation; needs no download."""
    answers: Answers = "given"
    """given: learn from rows as they stand. trunk: it rewrites every answer first, which is what decoding sees."""
    learn_from: Literal["answers", "all"] = "answers"
    """answers: heads learn where an answer stands. all: where a prompt stands, too; it costs nothing more, as the trunk
    reads both."""
    samples: int = Field(default=1, ge=1)
    """Answers the trunk writes per prompt; more than one needs a temperature."""
    temperature: float = Field(default=0.0, ge=0.0, le=10.0)
    """Of the trunk's answers; 0 is greedy, as evaluation is."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Longest answer the trunk writes."""
    answer_batch: int = Field(default=8, ge=1)
    """Answers the trunk writes side by side."""
    max_len: int = Field(default=512, ge=2)
    """Longest training document, in tokens; chats are cut there, plain text goes on as the next document."""
    strict: bool = False
    """Stop at the first row that cannot be used (a template that refuses it, no answer); else such rows are counted."""
    cache: bool = True
    """Keep what the trunk computed on disk, so that later epochs and resumed runs need not run it again."""

    @field_validator("source", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        listed = value if isinstance(value, list) else [value]
        return [{"path": item} if isinstance(item, str) else item for item in listed]

    @model_validator(mode="after")
    def _check(self) -> Self:
        asked = self.prompts or self.own_prompts or self.stdlib_prompts
        if not (self.source or asked or self.stdlib_tokens):
            raise ValueError(
                "no source of text; give source=FILE or org/name, prompts=everyday, own_prompts=N, stdlib_prompts=N or"
                " stdlib_tokens=N"
            )
        if asked and self.answers == "given":
            raise ValueError("prompts have no answers of their own; add data.answers=trunk")
        if self.samples > 1 and self.temperature == 0.0:
            raise ValueError(f"samples={self.samples} greedy answers would all be the same; give temperature=0.8 or so")
        return self
