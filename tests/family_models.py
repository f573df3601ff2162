"""Every family that hispec promises, as a tiny random model: one row each. To add a family, add its row."""

from typing import Any

from tiny_models import COMMON, GQA, OPT, Recipe
from transformers import (
    Cohere2Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    Starcoder2Config,
)

THETA: dict[str, Any] = {"rope_theta": 1e4}
SCALED: dict[str, Any] = THETA | {"factor": 4.0, "original_max_position_embeddings": 32}
LOCAL = ["sliding_attention", "sliding_attention", "full_attention"] * 2
CAPS: dict[str, Any] = {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}


def _llama(rope: dict[str, Any] | None = None, **changes: Any) -> LlamaConfig:
    return LlamaConfig(**GQA | {"tie_word_embeddings": False, "rope_parameters": rope} | changes)


# name: (config, scale of weights, scale of embedding and unembedding, seed, factor on OPT's position table)
FAMILIES: dict[str, Recipe] = {
    "llama": (lambda: _llama(), 0.3, 0.1, 2, 1),
    "llama_tied": (lambda: _llama(tie_word_embeddings=True), 0.3, 0.1, 0, 1),
    "llama_rope_llama3": (
        lambda: _llama(SCALED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        0.3, 0.1, 2, 1,
    ),
    "llama_rope_yarn": (lambda: _llama(SCALED | {"rope_type": "yarn"}), 0.3, 0.1, 2, 1),
    "llama_rope_linear": (lambda: _llama(THETA | {"rope_type": "linear", "factor": 4.0}), 0.3, 0.1, 2, 1),
    "llama_rope_dynamic": (lambda: _llama(THETA | {"rope_type": "dynamic", "factor": 4.0}), 0.3, 0.1, 2, 1),
    # CodeLlama: a llama with another base and, at 34B, grouped keys.
    "codellama": (lambda: _llama({"rope_type": "default", "rope_theta": 1e6}, num_key_value_heads=1), 0.3, 0.1, 2, 1),
    "mistral": (lambda: MistralConfig(**GQA, sliding_window=8, head_dim=12), 0.3, 1.0, 0, 1),
    "qwen2": (
        lambda: Qwen2Config(
            **GQA, use_sliding_window=True, sliding_window=8, max_window_layers=3, tie_word_embeddings=False
        ),
        0.3, 1.0, 1, 1,
    ),
    "qwen3": (lambda: Qwen3Config(**GQA, head_dim=24, tie_word_embeddings=True), 0.3, 1.0, 1, 1),
    "qwen3_moe": (
        lambda: Qwen3MoeConfig(
            **GQA | {"head_dim": 24},
            moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[1],
        ),
        0.3, 1.0, 1, 1,
    ),
    "opt": (lambda: OPTConfig(**OPT, word_embed_proj_dim=48, do_layer_norm_before=True), 1.0, 1.0, 1, 1),
    "opt_post_proj": (lambda: OPTConfig(**OPT, word_embed_proj_dim=32, do_layer_norm_before=False), 1.0, 0.1, 3, 10),
    "gemma2": (
        lambda: Gemma2Config(**GQA | CAPS, head_dim=12, query_pre_attn_scalar=12, sliding_window=8), 0.5, 0.05, 0, 1,
    ),
    "gemma3": (
        lambda: Gemma3TextConfig(
            **GQA, head_dim=24, query_pre_attn_scalar=24, sliding_window=8, layer_types=LOCAL,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        ),
        0.5, 0.05, 3, 1,
    ),
    "gpt2": (
        lambda: GPT2Config(
            vocab_size=211, n_embd=48, n_layer=6, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=None
        ),
        0.3, 0.3, 3, 1,
    ),
    "gpt_neox": (lambda: GPTNeoXConfig(**COMMON | {"rotary_pct": 0.5}, intermediate_size=96), 0.5, 0.05, 5, 1),
    "phi3": (lambda: Phi3Config(**GQA, sliding_window=8), 0.3, 0.3, 0, 1),
    "olmo2": (lambda: Olmo2Config(**GQA), 0.3, 0.3, 0, 1),
    "granite": (
        lambda: GraniteConfig(
            **GQA, embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.22, attention_multiplier=0.0883
        ),
        0.3, 0.1, 2, 1,
    ),
    "cohere2": (lambda: Cohere2Config(**GQA, logit_scale=0.0625, sliding_window=8, layer_types=LOCAL), 0.3, 1.0, 2, 1),
    "starcoder2": (lambda: Starcoder2Config(**GQA, sliding_window=8), 0.5, 0.05, 5, 1),
    "smollm3": (lambda: SmolLM3Config(**GQA, no_rope_layers=[1, 1, 0, 1, 1, 0]), 0.3, 0.3, 0, 1),
}  # fmt: skip
