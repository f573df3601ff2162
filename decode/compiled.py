"""Optional: torch.compile over the layers, one by one."""

from collections.abc import Iterable

import torch
from torch import nn
from transformers import AttentionInterface

from hispec.attention import NAME, reach


def compile_layers(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Fuse what stands between the matrix products of each layer: norms, rotary positions, activations, residuals.

    In a short pass these are small kernels that each read and write a few rows; products and attention stay what they
    are. All layers of one kind share one compiled graph, in which the number of rows is a variable (one row: a graph of
    its own). Returns the layers, for `uncompile`.
    """
    # The attention of a pass is looked up in Python: the graph ends before it and goes on behind it.
    AttentionInterface.register(NAME, torch.compiler.disable(reach))  # type: ignore[no-untyped-call]
    changed = list(layers)
    for layer in changed:
        layer.compile(dynamic=True)
    return changed


def uncompile(layers: Iterable[nn.Module]) -> None:
    """Take back what `compile_layers` changed."""
    for layer in layers:
        layer._compiled_call_impl = None
    AttentionInterface.register(NAME, reach)
