"""S fixture: a real tiny Llama whose next-token law is one known vector at every step, others at its exits.

All rows of the embedding are equal, so every position has the same hidden state (the values are equal, so attention
weights do not matter); unembeddings are of rank one: log p (x) h / |h|^2.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hispec.config import HeadConfig
from hispec.heads import Head
from hispec.trunk import Trunk

VOCAB = 12


def law(seed: int, base: Tensor | None = None, keep: float = 1.0, noise: float = 1.5) -> Tensor:
    """Log-probabilities [V], near `base` if it is given."""
    noise_V = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * noise
    return torch.log_softmax(noise_V if base is None else base * keep + noise_V, 0)


FULL = law(1)
MIDDLE = law(2, FULL, 0.8, 0.7)
DRAFT = law(3, MIDDLE, 0.7, 0.9)


class LawHead(Head):
    """The final norm, then its own matrix."""

    def __init__(self, trunk: Trunk, exit_: int, weight_VD: Tensor) -> None:
        super().__init__(trunk, exit_, HeadConfig(kind="norm"), 0)
        self.weight_VD = weight_VD

    def logits(self, features_TD: Tensor) -> Tensor:
        return features_TD @ self.weight_VD.T


@torch.no_grad()
def build(exits: tuple[int, int] = (1, 2), n_layers: int = 3) -> tuple[Trunk, list[Head]]:
    """The trunk, and its heads that follow DRAFT and MIDDLE."""
    width = 48
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=width, intermediate_size=96, num_hidden_layers=n_layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    model = model.eval().float()
    model.model.embed_tokens.weight.copy_(torch.randn(1, width).expand(VOCAB, width))
    out = model.model(torch.tensor([[3, 4, 5, 6]]), output_hidden_states=True)

    def matrix(log_law_V: Tensor, normed_D: Tensor) -> Tensor:
        return torch.outer(log_law_V.float(), normed_D / normed_D.dot(normed_D))

    model.lm_head.weight.copy_(matrix(FULL, out.last_hidden_state[0, -1]))
    weights = [
        matrix(log_law_V, model.model.norm(out.hidden_states[exit_][0, -1]))
        for exit_, log_law_V in zip(exits, (DRAFT, MIDDLE), strict=True)
    ]
    trunk = Trunk(model)
    return trunk, [LawHead(trunk, exit_, weight) for exit_, weight in zip(exits, weights, strict=True)]
