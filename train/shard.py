"""A trunk that no single GPU holds: each rank keeps a part of every layer, and a layer is whole only while it runs.

    rank 0    embedding  [ 1/2 of layer 1 ]  [ 1/2 of layer 2 ]  ...  norm, unembedding
    rank 1    embedding  [ 1/2 of layer 1 ]  [ 1/2 of layer 2 ]  ...  norm, unembedding

Layers lie in a second DeepSpeed engine, of ZeRO stage 3 and without optimizer. Embedding and unembedding stay whole on
every rank: losses read the unembedding once per chunk of positions and head, and gathering it each time would cost more
than the product. The first rank alone reads the weights from disk; no rank ever holds all of them on its GPU.

Ranks gather layers together, so whatever runs the trunk must run on all of them, equally often.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hispec.base import load_base
from hispec.ranks import join as decode_as_one
from hispec.train import ranks
from hispec.train.engine import load_deepspeed, quiet
from hispec.trunk import KVShape, Trunk

SETTINGS = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "steps_per_print": 10**9,
}


class ShardedTrunk(Trunk):
    """A trunk whose layers are split over the ranks."""

    in_step = True

    def __init__(self, network: PreTrainedModel) -> None:
        """`network`: with its weights on the first rank, without storage on the others.

        Raises:
            As `Trunk`.
        """
        ranks.join()
        decode_as_one()
        self._deepspeed = load_deepspeed()
        n_layers = int(network.config.get_text_config().num_hidden_layers)
        layers = next(m for m in network.modules() if isinstance(m, nn.ModuleList) and len(m) == n_layers)
        inside = {module for layer in layers for module in layer.modules()}
        _place(module for module in network.modules() if module not in inside)
        with quiet():
            for layer in layers:
                _place(layer.modules())
                self._deepspeed.zero.Init(module=layer, config_dict_or_path=SETTINGS, dtype=network.dtype)
            # A list of its own: the trunk puts another one, which knows of spans, in the place of the network's.
            whole = nn.ModuleList(layers)
            # A layer comes and goes as one, not matrix by matrix.
            self._deepspeed.utils.set_z3_leaf_modules(whole, list({type(layer) for layer in layers}))
            self._engine = self._deepspeed.initialize(model=whole, config=SETTINGS)[0]
        super().__init__(network)

    def copy_layer(self, place: int) -> tuple[nn.Module, KVShape]:
        """See `Trunk.copy_layer`; whole on every rank."""
        layer: Any = self.layers[place]
        with self.device:
            twin: nn.Module = type(layer)(self.model.config, place).to(self.dtype).eval().requires_grad_(False)
        with self._whole(layer.parameters()):
            twin.load_state_dict(layer.state_dict())
        for name, buffer in layer.named_buffers():
            twin.get_buffer(name).copy_(buffer)
        return twin, self.kv_shapes[place]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Trunk.weights`; gathered one after another, on all ranks."""
        for name, weight in super().weights():
            with self._whole([weight]):
                yield name, weight

    def _whole(self, weights: Iterable[Tensor]) -> contextlib.AbstractContextManager[None]:
        gathered: contextlib.AbstractContextManager[None] = self._deepspeed.zero.GatheredParameters(list(weights))
        return gathered


def load_sharded(name: str, revision: str | None, dtype: torch.dtype) -> tuple[ShardedTrunk, PreTrainedTokenizerBase]:
    """As `load_base`, spread over the ranks' devices.

    Raises:
        As `load_base`, and `Trunk`.
    """
    network, tokenizer = load_base(name, revision, dtype, weights=ranks.rank() == 0)
    return ShardedTrunk(network), tokenizer


@torch.no_grad()
def _place(modules: Iterable[nn.Module]) -> None:
    """Put the modules' own tensors on this rank's device, with the first rank's values; tied ones stay tied."""
    device = ranks.device()
    placed: dict[Tensor, Any] = {}
    for module in modules:
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is None:
                    continue
                if tensor not in placed:
                    there = tensor.to(device) if ranks.rank() == 0 else torch.empty_like(tensor, device=device)
                    dist.broadcast(there, 0)
                    is_weight = isinstance(tensor, nn.Parameter)
                    placed[tensor] = nn.Parameter(there, requires_grad=False) if is_weight else there
                own[name] = placed[tensor]
