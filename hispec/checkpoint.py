"""The heads folder, which is also the Hub repository: what is in it, how it is written, and when it is refused."""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from hispec.base import new_folder
from hispec.config import Config, HeadConfig, check_exits
from hispec.errors import BaseMismatchError, CheckpointError, ConfigError
from hispec.ranks import whole
from hispec.trunk import Trunk
from hispec.unembedding import lm_head_of

FORMAT_VERSION = 1
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
GENERATION, TEMPLATE = "generation_config.json", "chat_template.jinja"
# All there is in such a folder. Nothing else goes to the Hub.
FILES = {
    CONFIG: "what the heads are, of which model, how they were trained and what was measured",
    WEIGHTS: "the heads' tensors, nothing of the model",
    CARD: "this card",
    GENERATION: "stop tokens and defaults, as in training",
    TEMPLATE: "the chat template the heads were trained with",
}


class Fingerprint(Config):
    """What makes a trunk the trunk that heads were trained on."""

    model_type: str
    """Family, as transformers names it."""
    n_layers: int
    """Depth."""
    hidden_size: int
    """Width of a hidden state."""
    vocab_size: int
    """Rows of the unembedding."""
    lm_head: str
    """Hash of the unembedding's values, as bf16, so that loading in another precision does not matter."""
    tokenizer: str
    """Hash of the vocabulary."""


class BaseInfo(Config):
    """The trunk the heads belong to."""

    id: str
    """Folder, Hub id or package:NAME."""
    revision: str | None = None
    """Hub revision."""
    fingerprint: Fingerprint
    """What is compared when the heads are loaded."""


class HeadEntry(Config):
    """One head."""

    exit: int
    """Trunk layers run before it."""
    head: HeadConfig
    """What stands there."""


class CheckpointConfig(Config):
    """config.json of a heads folder."""

    library_name: str = "hispec"
    """For the Hub."""
    format_version: int = FORMAT_VERSION
    """Layout of this folder."""
    hispec_version: str
    """The hispec that wrote it."""
    base: BaseInfo
    """The trunk."""
    heads: list[HeadEntry]
    """From shallow to deep."""
    dtype: str
    """Of every floating tensor in model.safetensors."""
    chat_template_sha256: str | None = None
    """Of the template trained with."""
    training: dict[str, Any] = Field(default_factory=dict)
    """How the heads were trained."""
    metrics: dict[str, Any] = Field(default_factory=dict)
    """What the last evaluation measured."""


def fingerprint(trunk: Trunk, tokenizer: PreTrainedTokenizerBase) -> Fingerprint:
    """The identity of a trunk and its tokenizer."""
    weight = whole(lm_head_of(trunk.model).weight)
    values = weight.detach().to(torch.bfloat16).contiguous().view(torch.int16).cpu().numpy().tobytes()
    vocab = json.dumps(sorted(tokenizer.get_vocab().items()))
    return Fingerprint(
        model_type=trunk.name,
        n_layers=trunk.n_layers,
        hidden_size=trunk.hidden_size,
        vocab_size=trunk.vocab_size,
        lm_head=hashlib.sha256(values).hexdigest()[:32],
        tokenizer=hashlib.sha256(vocab.encode()).hexdigest()[:32],
    )


def check_base(expected: Fingerprint, found: Fingerprint, base: str) -> None:
    """Refuse heads of another trunk.

    Raises:
        BaseMismatchError: naming what differs.
    """
    for name, value in expected.model_dump().items():
        if (other := getattr(found, name)) != value:
            raise BaseMismatchError(
                f"these heads were trained on another model: {name} is {value} in the heads, {other} in {base!r};"
                " give the model they were trained on with base=..."
            )


def save(
    folder: Path,
    config: CheckpointConfig,
    tensors: Mapping[str, Tensor],
    card: str,
    generation: GenerationConfig | None,
    chat_template: str | None,
) -> None:
    """Write a heads folder; it appears under its name only when it is complete.

    Raises:
        FileError: the place cannot be written.
    """
    # Clones: tensors that share storage, or are views, are refused by safetensors.
    own = {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
    with new_folder(folder) as new:
        (new / CONFIG).write_text(config.model_dump_json(indent=2) + "\n")
        save_file(own, new / WEIGHTS, metadata={"format": "pt"})
        (new / CARD).write_text(card)
        if generation is not None:
            generation.save_pretrained(new)
        if chat_template is not None:
            (new / TEMPLATE).write_text(chat_template)


def read_config(folder: Path) -> CheckpointConfig:
    """Read config.json of a heads folder.

    Raises:
        CheckpointError: missing, not JSON, not of hispec, or of a format this version does not know.
    """
    path = folder / CONFIG
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a heads folder: it has no {CONFIG}") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); fetch or export the heads again") from None
    if data.get("library_name") != "hispec":
        raise CheckpointError(f"{path} does not describe hispec heads; to decode a plain model give exits=[...] too")
    version = data.get("format_version", FORMAT_VERSION)  # folders without the key are of the first format
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format_version {version}; this hispec reads {FORMAT_VERSION}; install a hispec that matches"
        )
    try:
        return CheckpointConfig.build(data)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a heads folder.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    with _opened(folder) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def check_whole(folder: Path) -> None:
    """Look at a heads folder without reading its tensors. Raises CheckpointError as the two functions above."""
    if not (folder / CONFIG).is_file() and (folder / "heads" / CONFIG).is_file():
        raise CheckpointError(f"{folder} is a run, not a heads folder; give {folder / 'heads'}")
    read_config(folder)
    with _opened(folder):
        pass


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[Any]:
    path = folder / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a heads folder: it has no {WEIGHTS}") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); fetch or export the heads again") from None


def choose(
    config: CheckpointConfig, tensors: Mapping[str, Tensor], exits: Sequence[int] | None, where: Path
) -> tuple[list[HeadEntry], dict[str, Tensor]]:
    """The heads at `exits` (None: all) and their tensors, numbered as if there were no others.

    Raises:
        ConfigError: exits that are not in order, or have no head. CheckpointError: a vocabulary only one file knows.
    """
    have = check_exits([entry.exit for entry in config.heads], config.base.fingerprint.n_layers)
    for slot, entry in enumerate(config.heads):
        if (entry.head.vocab_size is None) == (f"{slot}.vocab_ids" in tensors):
            raise CheckpointError(f"{where}: {CONFIG} and {WEIGHTS} disagree on the vocabulary of exit {entry.exit}")
    if exits is None:
        return config.heads, dict(tensors)
    for exit_ in check_exits(exits, config.base.fingerprint.n_layers):
        if exit_ not in have:
            raise ConfigError(f"exits: {exit_} has no head; this model has heads at {list(have)}")
    chosen: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        slot_, _, rest = name.partition(".")
        if slot_.isdecimal() and int(slot_) < len(have) and have[int(slot_)] in exits:
            chosen[f"{list(exits).index(have[int(slot_)])}.{rest}"] = tensor
    return [entry for entry in config.heads if entry.exit in exits], chosen


def load_into(heads: nn.ModuleList, tensors: Mapping[str, Tensor], where: Path) -> None:
    """Fill freshly made heads; every key must match, none may be left over.

    Raises:
        CheckpointError: naming the first key that is missing, unknown or of another shape.
    """
    own = heads.state_dict()
    for name in sorted(own.keys() | tensors.keys()):
        if name not in tensors:
            raise CheckpointError(f"{where / WEIGHTS}: tensor {name!r} is missing")
        if name not in own:
            raise CheckpointError(f"{where / WEIGHTS}: tensor {name!r} belongs to no head of {CONFIG}")
        if own[name].shape != tensors[name].shape:
            have, want = list(tensors[name].shape), list(own[name].shape)
            raise CheckpointError(f"{where / WEIGHTS}: tensor {name!r} has shape {have}, the heads need {want}")
    heads.load_state_dict(dict(tensors))
