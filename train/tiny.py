"""`model=tiny`: a random llama with a byte tokenizer, made on the spot, for trying out the whole way in seconds."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hispec.base import new_folder, quiet

NAME = "tiny"
SPECIAL = ("<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, seven special ones, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=list(SPECIAL[3:]),
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_tiny(folder: Path) -> None:
    """A model folder with 6 layers of 48, the same bytes every time."""
    if folder.is_dir():
        return
    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=48, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=[2, 6], pad_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(2)
    model: Any = LlamaForCausalLM(config)
    with torch.no_grad():
        # The library's own initialisation answers one single token for ever, which would test nothing.
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(1.0 + 0.3 * noise)
            else:
                parameter.copy_(noise * (0.1 if "embed" in name or "lm_head" in name else 0.3))
    with quiet(), new_folder(folder) as new:
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
