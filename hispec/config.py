"""Typed settings: frozen, validated, and explained by the line under each field."""

import difflib
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hispec.errors import ConfigError

C = TypeVar("C", bound="Config")
HeadKind = Literal["norm", "mlp", "block", "lora"]


class Config(BaseModel):
    """Base of every settings class: unknown keys are refused, values cannot change later."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
    refused: ClassVar[Mapping[str, str]] = {}
    """Names that people know from elsewhere and that are not offered here, with the reason."""

    @classmethod
    def build(cls: type[C], data: Mapping[str, Any]) -> C:
        """Validate `data` into this class.

        Raises:
            ConfigError: one line that names the key, its value and what is legal.
        """
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            raise ConfigError(_explain(cls, error)) from None


class HeadConfig(Config):
    """What is trained at an exit."""

    kind: HeadKind = "block"
    """norm: own final norm only. mlp: residual MLP. block: a whole decoder block with its own KV cache.
    lora: a low-rank update of the unembedding."""
    vocab_size: int | None = Field(default=None, ge=2)
    """Reduced draft vocabulary: the head predicts only this many of the most frequent tokens. null: all of them."""
    width: float = Field(default=4.0, gt=0)
    """Hidden width of an mlp head as a multiple of the model's hidden size."""
    rank: int = Field(default=16, ge=1)
    """Rank of a lora head's update."""
    unembedding: Literal["shared", "copied"] = "shared"
    """shared: the trunk's own, frozen and never stored. copied: a copy, as large as it is, trained and stored."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "lora" and self.unembedding == "copied":
            raise ValueError("a lora head updates the shared unembedding; give unembedding=shared, or another kind")
        return self


def _explain(cls: type[Config], error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        if path in cls.refused:
            return f"{path}: {cls.refused[path]}"
        keys = known_keys(cls)
        return unknown_key(path, {*keys, *(key.partition(".")[0] for key in keys)})
    if first["type"] == "missing":
        return f"{path}: a value is needed and none was given; add {path}=..."
    message = first["msg"].removeprefix("Value error, ")
    return f"{path}: {message[0].lower()}{message[1:]} (got {first['input']!r})" if path else message


def unknown_key(key: str, known: Iterable[str]) -> str:
    """The one-line message for a key that does not exist, with the nearest one that does."""
    known = sorted(known)
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
    return f"unknown key {key!r}; {hint}"


def known_keys(cls: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted names of all settings below `cls`."""
    keys: list[str] = []
    for name, field in cls.model_fields.items():
        nested = [t for t in _members(field.annotation) if isinstance(t, type) and issubclass(t, BaseModel)]
        keys += known_keys(nested[0], f"{prefix}{name}.") if nested else [prefix + name]
    return keys


def _members(annotation: Any) -> tuple[Any, ...]:
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return typing.get_args(annotation)
    return (annotation,)


def field_help(cls: type[BaseModel], last: type[BaseModel] | None = None) -> str:
    """One line per setting: name, default, and the line under it in the source; those of `last` come at the end."""
    names = list(cls.model_fields)
    if last is not None:
        names.sort(key=lambda name: name in last.model_fields)
    lines = []
    for name in names:
        field = cls.model_fields[name]
        shown = "" if field.is_required() else f" [{_written(field.get_default(call_default_factory=True))}]"
        about = " ".join((field.description or "").split())
        lines += textwrap.wrap(f"  {name + shown:28} {about}", width=120, subsequent_indent=" " * 31)
    return "\n".join(lines) + "\n"


def _written(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def parse_assignments(arguments: Sequence[str], cls: type[Config]) -> dict[str, Any]:
    """Read `key=value` words typed by a user into a mapping for `cls.build`.

    Text fields take the value as it stands, whatever it holds; lists are written `[2,4]`; `null` is None.
    """
    values: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument!r} is not an option; options are written key=value, see --help")
        field = cls.model_fields.get(key)
        if key in cls.refused:
            raise ConfigError(f"{key}: {cls.refused[key]}")
        if field is None:
            raise ConfigError(unknown_key(key, cls.model_fields))
        values[key] = _parse_value(key, text, _members(field.annotation))
    return values


def _parse_value(key: str, text: str, members: tuple[Any, ...]) -> Any:
    if type(None) in members and text in ("null", "none", "None", ""):
        return None
    if str in members and not (text.startswith("[") and any(typing.get_origin(m) in (list, tuple) for m in members)):
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{key}: {text!r} cannot be read as a value; lists are written [2,4]") from None


def check_repo_id(name: str) -> str:
    """A repository of the Hub, org/name. Raises ConfigError."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith("."):
        raise ConfigError(f"{name!r} is not a repository of the Hub; those are written org/name")
    return name


def check_exits(exits: Sequence[int], n_layers: int, name: str = "exits") -> tuple[int, ...]:
    """Exits in rising order, each once, each in 1..n_layers-1. `name`: of the setting that they stand in.

    Raises:
        ConfigError: naming the value and the legal range.
    """
    legal = f"legal exits of this model are 1..{n_layers - 1}"
    for exit_ in exits:
        if not 1 <= exit_ < n_layers:
            raise ConfigError(f"{name}: {exit_} is out of range; {legal} (it has {n_layers} layers)")
    if len(set(exits)) < len(exits):
        raise ConfigError(f"{name}: {list(exits)} names an exit twice; {legal}, each once")
    if list(exits) != sorted(exits):
        raise ConfigError(f"{name}: {list(exits)} must rise from shallow to deep; write {sorted(exits)}")
    return tuple(exits)


def default_exits(n_layers: int) -> tuple[int, ...]:
    """The paper's places, 1/8 and 1/4 of the depth (arXiv 2510.01336), kept apart on shallow models."""
    draft = max(1, round(n_layers / 8))
    verify = max(draft + 1, round(n_layers / 4))
    return check_exits([e for e in (draft, verify) if e < n_layers], n_layers)
