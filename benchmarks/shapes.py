"""Models of real shapes with random weights, and how many bytes their passes read."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hispec.trunk import Trunk


@dataclass(frozen=True)
class Shape:
    """A llama: sizes as published, `exits` as in the HiSpec paper (1/8 and 1/4 of the depth where it names none)."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    exits: tuple[int, int]
    itemsize: int = 2

    def layer_bytes(self) -> int:
        """Weights of one layer."""
        kv = self.hidden // self.heads * self.kv_heads
        return self.itemsize * (2 * self.hidden * (self.hidden + kv) + 3 * self.hidden * self.intermediate)

    def head_bytes(self) -> int:
        """The unembedding; embeddings are looked up, not read through."""
        return self.itemsize * self.hidden * self.vocab

    def kv_bytes(self, tokens: int) -> int:
        """Keys and values of one layer."""
        return self.itemsize * 2 * tokens * (self.hidden // self.heads) * self.kv_heads

    def pass_bytes(self, layers: int, tokens: int) -> int:
        """What a pass over `layers` and a head reads, `tokens` of context of all sequences included."""
        return layers * (self.layer_bytes() + self.kv_bytes(tokens)) + self.head_bytes()

    def weight_bytes(self) -> int:
        """What the whole model takes."""
        return self.layers * self.layer_bytes() + 2 * self.head_bytes()

    def build(self, device: str, positions: int) -> Trunk:
        """The model with random weights: bf16 on a GPU, fp32 on a CPU."""
        config = LlamaConfig(
            vocab_size=self.vocab, hidden_size=self.hidden, intermediate_size=self.intermediate,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.kv_heads,
            max_position_embeddings=positions, tie_word_embeddings=False,
        )  # fmt: skip
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16 if device != "cpu" else torch.float32)
        try:
            torch.manual_seed(0)
            with torch.device(device):
                model: Any = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(before)
        return Trunk(model.eval())


SHAPES = {
    "llama-2-7b": Shape("llama-2-7b", 4096, 11008, 32, 32, 32, 32000, (4, 8)),
    "llama-3-8b": Shape("llama-3-8b", 4096, 14336, 32, 32, 8, 128256, (3, 8)),
}
TINY = {
    "tiny-mha": Shape("tiny-mha", 64, 96, 4, 4, 4, 211, (1, 2), itemsize=4),
    "tiny-gqa": Shape("tiny-gqa", 64, 128, 4, 4, 2, 307, (1, 2), itemsize=4),
}
