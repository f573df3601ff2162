"""What can be said to hispec-bench, and its help. Imports no torch: the help must be there at once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, field_validator

from hispec.config import Config, field_help, parse_assignments, unknown_key
from hispec.decode.prompt_sets import SETS
from hispec.errors import ConfigError
from hispec.recipes import read_recipe_file, recipe_names

HELP = """\
hispec-bench: how fast a model's heads make it, against plain decoding and what people use today, fairly measured.

  hispec-bench recipe=smollm2 model=HEADS output=result.json             the README's table
  hispec-bench model=runs/quickstart/heads output=result.json            the packaged held-out prompts; needs no Hub
  hispec-bench model=HEADS prompts=[gsm8k,humaneval] plots=plots         other prompts, and pictures
  hispec-bench model=HEADS prompts.gsm8k=test.jsonl                      a set from a local file
  hispec-bench model=HEADS contestants.two_exits.policy=fixed:2,4        another policy
  hispec-bench model=HEADS contestants.deep.exits=[8] sweep.exits=[4,8]  a contestant of one's own; every pair of exits
  hispec-bench model=HEADS batches=[1,2,4,8,16]                          how speed grows with the batch
  hispec-bench recipe=NAME model=HEADS key=value ...                     a packaged recipe: {recipes}
  hispec-bench compare a.json b.json                                     two results side by side
  hispec-bench plot result.json FOLDER                                   pictures of a result that is there

All contestants decode the same prompts in one process, greedily, turn by turn in an order that turns, so that their
ratios mean something on a machine that is not quiet. tokens/s is the median over repeats (in brackets the lowest and
the highest), `vs plain` the median over all turns of this contestant's speed over that of plain decoding in the same
turn (in brackets the quartiles). Tokens are compared one by one with those of plain decoding. Peak memory is the whole
process's while a contestant decodes, and the weights of all contestants lie in it.

prompt sets
{sets}
  NAME, and prompts.NAME=FILE         a JSON or JSONL file of your own; its lines hold "prompt"

contestants
  plain             this engine without heads; always there, the others are measured against it
  one_exit          drafts from the shallowest exit, verified by the full model
  two_exits         hierarchical: drafts from the shallowest exit, judged at the next, verified by the full model
  plain_lookup      plain, and the full model verifies what followed the last few tokens earlier in the same text
  two_exits_lookup  two_exits, where that finds nothing
  auto              all exits and lookup, and a policy that decides by what it measures
  hf                Hugging Face's generate
  hf_prompt_lookup  ... with prompt_lookup_num_tokens
  hf_early_exit     ... with assistant_early_exit, where the model can leave early
  NAME              your own: contestants.NAME.exits=[4,8] contestants.NAME.policy=fixed:2,4

options (key=value)
"""


class ContestantOptions(Config):
    """How one contestant decodes."""

    exits: list[int] | None = None
    """Exits it uses; [] is plain decoding; null: what its name says, for your own ones all. hf_early_exit takes one."""
    policy: str | None = None
    """Policy; null: fixed:1 with one exit, fixed:1,1 with more, auto for auto. Short drafts suit weak exits."""
    lookup: bool | None = None
    """Whether tokens found earlier in the same text are drafts too; null: what the name says, with policy auto yes."""
    tokens: int = Field(default=10, ge=1)
    """hf_prompt_lookup: tokens copied from the prompt at a time."""


class SweepOptions(Config):
    """Contestants made of every exit and every pair of exits: the heat map."""

    exits: list[int]
    """Exits, each with a head; drafts come from one of them, and one behind it judges, or none does."""
    policy: str = "fixed:1,1"
    """Policy of all of them."""


class BenchOptions(Config):
    """What hispec-bench understands."""

    recipe: str | None = None
    """Packaged settings, which those typed here replace."""
    model: str
    """Heads folder or Hub id; a plain model with heads=none or heads=shared."""
    heads: Literal["trained", "shared", "none"] = "trained"
    """shared: `model` is a plain model, read at `exits` by its own norm and lm_head. none: and decoded plainly only."""
    exits: list[int] = []
    """Exits to read at, with heads=shared."""
    prompts: dict[str, str | None] | None = None
    """Prompt sets, [NAME,...]; prompts.NAME=FILE or =org/name says where one comes from. null: held_out."""
    max_prompts: int = Field(default=16, ge=1)
    """Prompts used of each set, drawn with `seed`."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Longer prompts are passed over; null: those that do not fit the model."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Tokens generated per prompt, less where the model stops by itself."""
    template: bool = True
    """Wrap each prompt as a user's message in the model's chat template, if it has one."""
    contestants: dict[str, ContestantOptions] | None = None
    """Who takes part, [NAME,...]; null: hf, plain, one_exit, two_exits, auto, as far as the model has exits."""
    sweep: SweepOptions | None = None
    """Every exit and pair of exits as further contestants: sweep.exits=[4,8,12]."""
    batches: list[int] = [1]
    """Batch sizes, one after the other. At more than 1, Hugging Face's speculation cannot take part."""
    turn: int | None = Field(default=None, ge=1)
    """Prompts a contestant decodes before the next one's turn; null: the batch size. More let sequences that finish
    make room for others, as in use."""
    repeats: int = Field(default=3, ge=1)
    """Times that everything is measured."""
    seed: int = Field(default=0, ge=0)
    """Draws the prompts."""
    costs: bool = True
    """Say what a pass of each level costs here at batch 1, and what speed that allows if every draft stood."""
    training: list[str] = []
    """What the heads were trained on: no prompt measured here may occur in these files, packaged lists or answers/ of a
    run."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: as the model is stored."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads; null: torch's default."""
    output: str | None = None
    """JSON file for everything measured. What is finished is there after Ctrl-C, too."""
    plots: str | None = None
    """Folder for pictures (PNG) and report.html; needs pip install 'hispec[bench]'."""

    @field_validator("prompts", mode="before")
    @classmethod
    def _name_prompts(cls, value: object) -> object:
        return as_mapping(value, None)

    @field_validator("contestants", mode="before")
    @classmethod
    def _name_contestants(cls, value: object) -> object:
        mapping = as_mapping(value, {})
        return {k: v or {} for k, v in mapping.items()} if isinstance(mapping, dict) else mapping

    @field_validator("training", mode="before")
    @classmethod
    def _one_file(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("batches")
    @classmethod
    def _sizes(cls, value: list[int]) -> list[int]:
        if not value or min(value) < 1:
            raise ValueError("batch sizes are 1 or more, and there is at least one")
        return value


DEFAULT_CONTESTANTS = ["hf", "plain", "one_exit", "two_exits", "auto"]


def as_mapping(value: object, empty: object) -> object:
    """`[a, b]` or `a,b` as a mapping; a file stands under its stem."""
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, list):
        return value
    named: dict[str, object] = {}
    for item in map(str, value):
        is_file = "." in item or "/" in item
        named[Path(item).stem if is_file else item] = item if is_file else empty
    return named


def read_options(words: Sequence[str]) -> BenchOptions:
    """What was typed, over the recipe that was named, if one was.

    Raises:
        ConfigError: an unknown key or recipe, or a value that is not legal.
    """
    dotted = [word for word in words if "." in word.partition("=")[0]]
    typed = parse_assignments([word for word in words if word not in dotted], BenchOptions)
    values: dict[str, Any] = _recipe(typed["recipe"]) | typed if typed.get("recipe") else typed
    for word in dotted:
        key, equals, text = word.partition("=")
        root, _, path = key.partition(".")
        if not equals:
            raise ConfigError(f"{word!r} is not an option; options are written key=value, see --help")
        if root == "prompts":
            values[root] = {**_mapping(values.get(root), []), path: text}
        elif root == "contestants" and "." in path:
            name, setting = path.rsplit(".", 1)
            values[root] = _mapping(values.get(root), DEFAULT_CONTESTANTS)
            values[root][name] = {**(values[root].get(name) or {}), setting: yaml.safe_load(text)}
        elif root == "sweep":
            values[root] = {**(values.get(root) or {}), path: yaml.safe_load(text)}
        else:
            raise ConfigError(
                f"unknown key {key!r}; dotted keys are prompts.NAME, contestants.NAME.SETTING and sweep.SETTING"
            )
    return BenchOptions.build(values)


def _mapping(value: object, default: list[str]) -> dict[str, Any]:
    mapping = as_mapping(default if value is None else value, None)
    return dict(mapping) if isinstance(mapping, dict) else {}


def _recipe(name: str) -> dict[str, Any]:
    names = recipe_names("bench")
    if name not in names:
        raise ConfigError(
            unknown_key(name, names).replace("unknown key", "unknown recipe").replace("known keys", "there are")
        )
    values: dict[str, Any] = yaml.safe_load(read_recipe_file(f"bench/{name}.yaml"))
    return values


def help_text() -> str:
    """The whole help."""
    lines = "\n".join(f"  {name:17} {own.about}" for name, own in SETS.items())
    return (
        HELP.format(recipes=", ".join(recipe_names("bench")), sets=lines)
        + field_help(BenchOptions)
        + "\nsettings of a contestant (contestants.NAME.key=value)\n"
        + field_help(ContestantOptions)
        + "\nsettings of the sweep (sweep.key=value)\n"
        + field_help(SweepOptions)
    )
