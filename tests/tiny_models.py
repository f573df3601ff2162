"""F1: ten tiny random models that do not degenerate, and a cache-free reference loop.

Not the library's own initialisation: its tied models say one token for ever, its biases are zero and its norms one, so
that equality tests would pass while testing nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 211
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GQA: dict[str, Any] = COMMON | {"intermediate_size": 96, "num_key_value_heads": 2}
OPT: dict[str, Any] = COMMON | {"ffn_dim": 96, "dropout": 0.1}

# name: (config, scale of weights, scale of embedding and unembedding, seed, factor on OPT's position table)
Recipe = tuple[Callable[[], PretrainedConfig], float, float, int, int]
F1: dict[str, Recipe] = {
    "llama_gqa": (lambda: LlamaConfig(**GQA, tie_word_embeddings=False), 0.3, 0.1, 2, 1),
    "llama_tied": (lambda: LlamaConfig(**GQA, tie_word_embeddings=True), 0.3, 0.1, 0, 1),
    "qwen2_bias": (
        lambda: Qwen2Config(
            **GQA, use_sliding_window=False, sliding_window=8, max_window_layers=0, tie_word_embeddings=False
        ),
        0.3, 1.0, 1, 1,
    ),
    "qwen3": (lambda: Qwen3Config(**GQA, head_dim=24, tie_word_embeddings=True), 0.3, 1.0, 1, 1),
    "mistral_sw8": (lambda: MistralConfig(**GQA, sliding_window=8, head_dim=12), 0.3, 1.0, 0, 1),
    "gemma2": (
        lambda: Gemma2Config(
            **GQA, head_dim=12, query_pre_attn_scalar=12, sliding_window=8,
            attn_logit_softcapping=20.0, final_logit_softcapping=10.0,
        ),
        0.5, 0.05, 0, 1,
    ),
    "granite": (
        lambda: GraniteConfig(
            **GQA, embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.22, attention_multiplier=0.0883
        ),
        0.3, 0.1, 2, 1,
    ),
    "cohere": (lambda: CohereConfig(**GQA, logit_scale=0.0625), 0.3, 1.0, 2, 1),
    "opt_pre": (lambda: OPTConfig(**OPT, word_embed_proj_dim=48, do_layer_norm_before=True), 1.0, 1.0, 1, 1),
    "opt_post_proj": (lambda: OPTConfig(**OPT, word_embed_proj_dim=32, do_layer_norm_before=False), 1.0, 1.0, 1, 10),
}  # fmt: skip


def build(name: str) -> PreTrainedModel:
    """The model `name`, the same weights every time."""
    return make(F1[name])


def make(recipe: Recipe) -> PreTrainedModel:
    """The model of a recipe, the same weights every time."""
    make_config, scale, embed_scale, seed, position_factor = recipe
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(make_config())  # type: ignore[no-untyped-call]
    model = model.float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * (embed_scale if ("embed" in key or "lm_head" in key) else scale))
            elif "bias" in key:
                parameter.copy_(0.3 * noise)
            else:
                parameter.add_(0.3 * noise)
        if position_factor != 1:
            model.model.decoder.embed_positions.weight.mul_(position_factor)
    result: PreTrainedModel = model
    return result


@torch.no_grad()
def reference(
    model: PreTrainedModel, prompt: Sequence[int], n: int, stop_ids: Sequence[int] = ()
) -> tuple[list[int], float]:
    """Plain greedy decoding without any cache: at most `n` new ids, and the smallest gap of best and second logit."""
    ids, gap = list(prompt), float("inf")
    for _ in range(n):
        logits_V = model(torch.tensor([ids]), use_cache=False).logits[0, -1].float()
        best = logits_V.topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :], gap
