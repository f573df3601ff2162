"""From hidden states to logits, as the model's own wrapper goes: with every scale, cap and bias it has.

Letters: T packed tokens, D hidden size, V vocabulary, v the rows of it that are kept.
"""

import copy
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from hispec.linear import prepack
from hispec.ranks import whole
from hispec.stand_ins import Given


def lm_head_of(model: Any) -> Any:
    """The model's unembedding matrix, an nn.Linear."""
    return model.get_output_embeddings()


def base_name_of(model: PreTrainedModel) -> str | None:
    """The attribute under which a causal LM holds its base model; `base_model_prefix` is not right in every family."""
    return next((name for name, child in model.named_children() if isinstance(child, PreTrainedModel)), None)


class Unembedding:
    """Hidden state to logits, with every scale and cap the model's own wrapper applies; optionally some tokens only."""

    def __init__(self, model: PreTrainedModel, vocab_ids: Tensor | None = None) -> None:
        """`vocab_ids` [v]: rows of the vocabulary to keep; None keeps all."""
        # A shallow copy: same parameters, but its base model (and, when reduced, its lm_head) is replaced.
        self.wrapper = copy.copy(model)
        self.wrapper._modules = dict(model._modules)
        self.given = Given()
        base = base_name_of(model)
        assert base is not None
        self.wrapper._modules[base] = self.given
        self.matrix: Any = lm_head_of(model)
        if vocab_ids is not None:
            full = self.matrix
            rows = nn.Linear(full.in_features, len(vocab_ids), bias=full.bias is not None, device="meta")
            for name, tensor in full.named_parameters():
                kept = whole(tensor.detach())[vocab_ids.to(tensor.device)]
                setattr(rows, name, nn.Parameter(kept, requires_grad=False))
            self._put(rows)
            prepack([rows])
        self.vocab_ids = vocab_ids

    def replaced(self, matrix: nn.Module) -> "Unembedding":
        """The same with another module in the place of `matrix`, the linear layer that the logits come from."""
        other = copy.copy(self)
        other.wrapper = copy.copy(self.wrapper)
        other.wrapper._modules = dict(self.wrapper._modules)
        other._put(matrix)
        return other

    def _put(self, matrix: nn.Module) -> None:
        name = next(name for name, module in self.wrapper._modules.items() if module is self.matrix)
        self.wrapper._modules[name] = self.matrix = matrix

    def __call__(self, features_TD: Tensor) -> Tensor:
        """Logits [T, V] of normalised hidden states."""
        self.given.hidden_1TD = features_TD[None]
        logits: Tensor = self.wrapper(input_ids=None, inputs_embeds=features_TD[None], use_cache=False).logits[0]
        return logits
