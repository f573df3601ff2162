"""What a model family must be like to be a trunk, read off its configuration.

There is no list of families: whatever transformers lets us give another attention is tried, and refused here, or by the
trunk's own probe, if it could come out wrong. tests/family_models.py lists the families that are gated by tests.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from hispec.errors import ConfigError, UnsupportedModelError

log = logging.getLogger("hispec")


def check_attention(model: Any) -> None:
    """Refuse models that are no decoders, or whose attention cannot be replaced.

    Raises:
        UnsupportedModelError: naming the model's type.
    """
    text = model.config.get_text_config()
    if text.is_encoder_decoder or not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"models of type {text.model_type!r} do not let their attention be replaced (transformers'"
            " _supports_attention_backend); hispec needs a decoder such as llama, qwen3, mistral, gemma2 or opt"
        )


def check_windows(text: Any, windows: Mapping[int, int | None], max_positions: int) -> None:
    """Compare the window that each layer's attention was told of with the mask that the model would have built.

    hispec has no masks built: a family that limits what a token sees by its mask alone would silently see too much.

    Raises:
        UnsupportedModelError: naming the layer.
    """
    # A stray key in a config.json means nothing to a family that has no such setting.
    width = getattr(text, "sliding_window", None) if hasattr(type(text), "sliding_window") else None
    types = getattr(text, "layer_types", None) or ["sliding_attention" if width else "full_attention"] * len(windows)
    for layer, kind in enumerate(types):
        wanted = {"full_attention": None, "sliding_attention": width}.get(kind, -1)
        # A window that reaches over every legal position hides nothing.
        reach = {wanted or max_positions, windows.get(layer) or max_positions}
        if len({min(each, max_positions) for each in reach}) > 1:
            raise UnsupportedModelError(
                f"layer {layer} of this {text.model_type!r} model sees {kind} (window {width}), and does not tell its"
                f" attention so (window {windows.get(layer)}); it cannot be a trunk"
            )


def check_shards(text: Any, n_ranks: int) -> None:
    """Refuse a number of ranks that cannot share the heads of every layer evenly.

    Raises:
        ConfigError: naming the numbers of heads. UnsupportedModelError: transformers cannot shard this family.
    """
    if not getattr(text, "base_model_tp_plan", None):
        raise UnsupportedModelError(
            f"transformers has no tensor-parallel plan for models of type {text.model_type!r}; start one process"
        )
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    if heads % n_ranks or kv_heads % n_ranks:
        legal = [n for n in range(1, kv_heads + 1) if not heads % n and not kv_heads % n]
        raise ConfigError(
            f"{n_ranks} processes cannot share {heads} attention heads and {kv_heads} KV heads evenly; start"
            f" {', '.join(map(str, legal[:-1])) + ' or ' if legal[:-1] else ''}{legal[-1]} (torchrun --nproc-per-node)"
        )


def constant_positions(text: Any) -> int:
    """The number of positions within which a token's rotary angles do not depend on how long its text has become.

    Beyond it, `dynamic` and `longrope` rope turn every earlier key anew at every length: keys that are kept would be
    those of another length, for any engine with a cache. Decoding stays exact by ending there.
    """
    limit = int(getattr(text, "max_position_embeddings", None) or 2**31)
    for rope in _ropes(getattr(text, "rope_parameters", None) or {}):
        if rope.get("rope_type") == "longrope":
            original = int(rope.get("original_max_position_embeddings") or limit)
            if original < limit:
                log.warning(
                    "longrope turns all keys anew past %d tokens: exact decoding ends there, not at %d", original, limit
                )
                limit = original
    return limit


def _ropes(parameters: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The rope settings: one, or one per kind of layer."""
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    yield from nested or [parameters]
