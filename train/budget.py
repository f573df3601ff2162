"""What a run takes, reckoned from shapes alone: memory of each rank, arithmetic and time.

Everything here is an estimate and says so where it is printed; nothing of it decides what is run.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from hispec.config import HeadConfig
from hispec.train.batch import BatchTriple
from hispec.train.config import TrainConfig

GB = 1e9
# Of one GPU in bfloat16, for planning away from it: a modest share of what an A100 or a later one can do.
ASSUMED_FLOPS = 150e12
FLOAT = 4


@dataclass(frozen=True)
class Shape:
    """Sizes of a trunk, counted on a model without storage."""

    n_parameters: int
    n_layers: int
    n_layer: int
    """Parameters of one layer."""
    hidden: int
    vocab: int

    @property
    def n_outside(self) -> int:
        """Parameters that are in no layer: embedding, unembedding, final norm."""
        return self.n_parameters - self.n_layers * self.n_layer

    @classmethod
    def of(cls, settings: PretrainedConfig) -> "Shape":
        """From the trunk's own config."""
        text: Any = settings.get_text_config()
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(settings)  # type: ignore[no-untyped-call]
        n_layers = int(text.num_hidden_layers)
        layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == n_layers)
        whole, one = (sum(p.numel() for p in m.parameters()) for m in (model, layers[0]))
        return cls(whole, n_layers, one, int(text.hidden_size), int(text.vocab_size))


def trained(head: HeadConfig, shape: Shape) -> int:
    """Parameters of a head that are trained."""
    vocab, hidden = head.vocab_size or shape.vocab, shape.hidden
    kinds = {
        "norm": 0,
        "mlp": round(3 * head.width * hidden * hidden) + hidden,
        "block": shape.n_layer + (hidden + 1) * hidden,
        "lora": head.rank * (hidden + vocab),
    }
    return hidden + kinds[head.kind] + (vocab * hidden if head.unembedding == "copied" else 0)


def memory(
    config: TrainConfig, shape: Shape, heads: Sequence[HeadConfig], triple: BatchTriple, size: int
) -> dict[str, float]:
    """Bytes on each rank, by what they are for. `size`: bytes of one of the trunk's numbers."""
    parts: dict[str, float] = {}
    world = triple.world
    if config.trunk.shard == "zero3":
        parts[f"1/{world} of the trunk's layers"] = shape.n_layers * shape.n_layer * size / world
        parts["the trunk's embedding and unembedding, whole"] = shape.n_outside * size
        parts["the layer that runs, whole, and the next one"] = 2 * shape.n_layer * size
    else:
        parts["the trunk, whole"] = shape.n_parameters * size
    n, stage = sum(trained(head, shape) for head in heads), config.train.zero
    # float32 weights, gradients, two averages of AdamW. ZeRO 1 splits the averages, 2 the gradients too, 3 all.
    split = {0: 0, 1: 2, 2: 3, 3: 4}[stage]
    here = (4 - split) + (split - (2 if config.train.offload else 0)) / world
    parts[f"heads: weights, gradients, averages (ZeRO stage {stage})"] = n * FLOAT * here
    own = [head.vocab_size for head in heads if head.vocab_size is not None]
    if own:
        parts["the rows of the reduced vocabularies"] = sum(own) * shape.hidden * size
    parts["logits of one chunk"] = 6 * config.train.loss.chunk * shape.vocab * FLOAT
    # Hidden states at the exits, one layer of the trunk at work, and what the heads keep for their backward pass.
    per_token = (len(heads) + 10) * shape.hidden * FLOAT + len(heads) * 20 * shape.hidden * size
    parts["activations, roughly"] = triple.micro * per_token
    return parts


def work(shape: Shape, heads: Sequence[HeadConfig]) -> tuple[float, float]:
    """Arithmetic of one token: of the trunk's pass, and of the heads' forward and backward."""
    end = 2 * shape.hidden * shape.vocab
    trunk = 2 * shape.n_layers * shape.n_layer + end
    own = 0.0
    for head in heads:
        # The teacher's logits over the head's vocabulary, the head's, and the gradient of its features.
        reading = 6 * shape.hidden * (head.vocab_size or shape.vocab)
        own += 6 * trained(head, shape) + reading
    return trunk, own


def flops(device: str) -> float:
    """Arithmetic that this machine does in a second, measured on a product of matrices."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    n = 1024 if device == "cpu" else 8192
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        (a @ b).sum().item()  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best
