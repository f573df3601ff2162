"""A trunk with its heads: loaded, saved, pushed."""

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from hispec import checkpoint
from hispec.base import base_config, load_base, locate
from hispec.card import write_card
from hispec.checkpoint import BaseInfo, CheckpointConfig, HeadEntry
from hispec.config import HeadConfig, check_exits
from hispec.errors import CheckpointError, FileError, first_line
from hispec.heads import Head, make_heads
from hispec.push import PushOptions, push
from hispec.trunk import Trunk
from hispec.version import __version__


class HiSpecModel:
    """A frozen trunk and the heads at its exits.

    Attributes:
        trunk, tokenizer: the pretrained model and its tokenizer.
        heads: from shallow to deep. exits: their places.
        generation: the trunk's generation defaults, stop tokens among them.
        base: name and revision the trunk was loaded from.
        training, metrics: what the checkpoint records of how the heads were made and measured.
    """

    def __init__(
        self,
        trunk: Trunk,
        tokenizer: PreTrainedTokenizerBase,
        heads: nn.ModuleList,
        base: str,
        revision: str | None = None,
        generation: GenerationConfig | None = None,
    ) -> None:
        self.trunk, self.tokenizer, self.heads = trunk, tokenizer, heads
        self.base, self.revision = base, revision
        self.generation: Any = generation or trunk.model.generation_config or GenerationConfig()  # type: ignore[no-untyped-call]
        self.training: dict[str, Any] = {}
        self.metrics: dict[str, Any] = {}

    @property
    def exits(self) -> tuple[int, ...]:
        return tuple(head.exit for head in self.heads_list)

    @property
    def heads_list(self) -> list[Head]:
        return [head for head in self.heads if isinstance(head, Head)]

    @classmethod
    def from_base(
        cls,
        base: str | os.PathLike[str],
        exits: Sequence[int] = (),
        head: HeadConfig | None = None,
        *,
        revision: str | None = None,
        dtype: torch.dtype | None = None,
        device: str = "cpu",
        n_ranks: int = 1,
    ) -> "HiSpecModel":
        """A pretrained model with untrained heads: the logit lens at each of `exits`.

        Models pre-trained for early exit (LayerSkip's) decode well this way; `exits=()` decodes plainly.
        `n_ranks`: processes, started by torchrun, that share the trunk's layers among them; heads are whole on each.

        Raises:
            ConfigError: exits that the model cannot have, before its weights are loaded.
            FileError, UnsupportedModelError: as `hispec.base.load_base` and `Trunk`.
        """
        name = os.fspath(base)
        exits = check_exits(exits, int(base_config(name, revision).get_text_config().num_hidden_layers))
        model, tokenizer = load_base(name, revision, dtype, device, n_ranks)
        trunk = Trunk(model)
        heads = make_heads(trunk, exits, [head or HeadConfig(kind="norm")] * len(exits))
        return cls(trunk, tokenizer, heads, name, revision)

    @classmethod
    def from_pretrained(
        cls,
        heads: str | os.PathLike[str],
        *,
        exits: Sequence[int] | None = None,
        base: str | os.PathLike[str] | None = None,
        revision: str | None = None,
        dtype: torch.dtype | None = None,
        device: str = "cpu",
        n_ranks: int = 1,
    ) -> "HiSpecModel":
        """Load heads, and the trunk they name, from a folder or a Hub id.

        `exits`: which of the heads; all by default. `base` replaces the trunk's recorded place (a moved folder, say);
        it must be the same model. `n_ranks` as for `from_base`.

        Raises:
            ConfigError: an exit without a head, before the weights of the trunk are loaded.
            CheckpointError: damaged or of an unknown format. BaseMismatchError: the trunk is another model.
            FileError: heads or trunk are not to be found.
        """
        folder = _fetch(os.fspath(heads), revision)
        config = checkpoint.read_config(folder)
        tensors = checkpoint.read_tensors(folder)
        entries, tensors = checkpoint.choose(config, tensors, exits, folder)
        name = os.fspath(base or config.base.id)
        model, tokenizer = load_base(name, None if base else config.base.revision, dtype, device, n_ranks)
        trunk = Trunk(model)
        checkpoint.check_base(config.base.fingerprint, checkpoint.fingerprint(trunk, tokenizer), name)
        vocab_ids = [tensors.get(f"{slot}.vocab_ids") for slot in range(len(entries))]
        module_list = make_heads(trunk, [entry.exit for entry in entries], [entry.head for entry in entries], vocab_ids)
        checkpoint.load_into(module_list, tensors, folder)
        template = folder / checkpoint.TEMPLATE
        if template.is_file():
            tokenizer.chat_template = template.read_text()
        generation = None
        if (folder / checkpoint.GENERATION).is_file():
            generation = GenerationConfig.from_pretrained(folder)
        loaded = cls(trunk, tokenizer, module_list, config.base.id, config.base.revision, generation)
        loaded.training, loaded.metrics = config.training, config.metrics
        return loaded

    def save_pretrained(self, folder: str | os.PathLike[str], dtype: torch.dtype | None = None) -> None:
        """Write the heads folder (not the trunk); `dtype` None keeps the heads' own.

        Raises:
            FileError: the place cannot be written.
        """
        dtype = dtype or self.trunk.dtype
        template = self.tokenizer.chat_template
        template = template if isinstance(template, str) else None
        config = CheckpointConfig(
            hispec_version=__version__,
            base=BaseInfo(
                id=_portable(self.base),
                revision=self.revision,
                fingerprint=checkpoint.fingerprint(self.trunk, self.tokenizer),
            ),
            heads=[HeadEntry(exit=head.exit, head=head.config) for head in self.heads_list],
            dtype=str(dtype).removeprefix("torch."),
            chat_template_sha256=None if template is None else hashlib.sha256(template.encode()).hexdigest(),
            training=self.training,
            metrics=self.metrics,
        )
        tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in self.heads.state_dict().items()}
        files = [name for name in checkpoint.FILES if name != checkpoint.TEMPLATE or template is not None]
        card = write_card(config, Path(folder).name, files)
        checkpoint.save(Path(folder), config, tensors, card, self.generation, template)

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, revision: str | None = None, token: str | None = None
    ) -> str:
        """Upload the heads to the Hub as `hispec-push` does; returns the address of the commit.

        Raises:
            FileError: the Hub could not be reached, or did not take them.
        """
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "heads"
            self.save_pretrained(folder)
            return push(folder, repo_id, PushOptions(private=private, revision=revision), token)


def _fetch(name: str, revision: str | None) -> Path:
    if Path(name).is_dir():
        return Path(name)
    if locate(name) != name:
        raise CheckpointError(f"{name!r} is a model, not heads; give the folder that hispec-train exported")
    try:
        return Path(snapshot_download(name, revision=revision))
    except RepositoryNotFoundError:
        raise FileError(
            f"heads {name!r}: neither a folder here nor a repository on the Hub (or it is private)"
        ) from None
    except RevisionNotFoundError:
        raise FileError(f"heads {name!r}: the repository has no revision {revision!r}") from None
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        why = first_line(error)
        raise FileError(f"heads {name!r}: no such folder, and the Hub did not deliver it: {why}") from None


def _portable(base: str) -> str:
    return str(Path(base).resolve()) if Path(base).is_dir() else base
