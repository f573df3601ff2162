"""hispec: early-exit heads for pretrained language models, and hierarchical, lossless decoding with them."""

import importlib
from typing import TYPE_CHECKING, Any

from hispec.version import __version__

if TYPE_CHECKING:
    from hispec.decode.decoder import Decoder as Decoder
    from hispec.decode.request import Completion as Completion
    from hispec.decode.request import SamplingParams as SamplingParams
    from hispec.model import HiSpecModel as HiSpecModel

__all__ = ["Completion", "Decoder", "HiSpecModel", "SamplingParams", "__version__"]

# Loaded when first asked for: `hispec-decode --help` must not wait for torch.
_HOMES = {
    "HiSpecModel": "hispec.model",
    "Decoder": "hispec.decode.decoder",
    "Completion": "hispec.decode.request",
    "SamplingParams": "hispec.decode.request",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hispec' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
