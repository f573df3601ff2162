"""Linear layers on a CPU, faster than the library's: for weights that stay as they are, and for those being trained.

Decoding multiplies one to a few dozen rows with each weight, and a general matrix product is not made for that: its
cost may double from one row to two. oneDNN's prepacked layout reads the weight once for any small row count, so
verifying several tokens costs what one costs; on some processors it is the faster one for many rows too. Which is
faster is measured per shape, and the winner is kept. The weights themselves are not touched.

In training, where weights change, oneDNN still makes the three products of a layer (forward, and the gradients of input
and weight) in half the time where the library's own ones do not use all that the processor has.

Letters: R rows, I inputs, O outputs.
"""

import copy
import time
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hispec.ranks import joined

# Smaller layers cost what their call costs, in either layout.
_MIN_WEIGHTS = 1 << 16
_ROWS_MEASURED = (1, 4)


class PackedLinear:
    """The forward of an nn.Linear over a prepacked copy of its weight; where a gradient is wanted, `product`."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.weight_OI, self.bias_O = weight_OI, bias_O
        self._pack()

    def _pack(self) -> None:
        self.state = (self.weight_OI._version, self.weight_OI.data_ptr())
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight_OI.detach(), 4)

    def __deepcopy__(self, memo: dict[int, object]) -> "PackedLinear":
        return PackedLinear(copy.deepcopy(self.weight_OI, memo), copy.deepcopy(self.bias_O, memo))

    def __call__(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        if torch.is_grad_enabled() and (x.requires_grad or self.weight_OI.requires_grad):
            return product(x, self.weight_OI, self.bias_O)
        if self.state != (self.weight_OI._version, self.weight_OI.data_ptr()):
            self._pack()  # a head that was trained on since
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias_O, "none", [], "")
        return out


def prepack(roots: Iterable[nn.Module]) -> list[nn.Linear]:
    """Give the linear layers below `roots` the faster forward where it is faster here; returns those that were changed.

    Does nothing away from fp32 on a CPU, where torch was built without oneDNN, or among ranks that decode as one: each
    would measure for itself, and two layouts may round differently. Sharded layers have a forward of their own already.
    """
    if joined() or not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return []
    by_shape: dict[torch.Size, dict[nn.Linear, PackedLinear]] = {}
    for module in (m for root in roots for m in root.modules()):
        if type(module) is nn.Linear and "forward" not in vars(module):
            weight = module.weight
            if _suits(weight):
                same = by_shape.setdefault(weight.shape, {})
                if module not in same:
                    same[module] = PackedLinear(weight, module.bias)
    changed: list[nn.Linear] = []
    for same in by_shape.values():
        if _is_faster(list(same.values())):
            for module, packed in same.items():
                module.forward = packed  # type: ignore[method-assign, assignment]
                changed.append(module)
    return changed


def quicken(root: nn.Module) -> None:
    """Let the linear layers below `root` train by `product`, where that is faster here; see `unpack`."""
    for module in root.modules():
        if type(module) is nn.Linear and _suits(module.weight) and _onednn_pays():
            module.forward = partial(_train, module)  # type: ignore[method-assign]


def _train(layer: nn.Linear, x: Tensor) -> Tensor:
    return product(x, layer.weight, layer.bias)


def product(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """[..., I] to [..., O], as F.linear, with gradients."""
    if _suits(weight_OI) and x.dtype == weight_OI.dtype and _onednn_pays():
        out: Tensor = _Product.apply(x, weight_OI, bias_O)  # type: ignore[no-untyped-call]
        return out
    return F.linear(x, weight_OI, bias_O)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        return _onednn(x, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight_OI = ctx.saved_tensors
        grad_RO, x_RI = grads[0].reshape(-1, len(weight_OI)), x.reshape(-1, x.shape[-1])
        wanted_x, wanted_weight, wanted_bias = ctx.needs_input_grad
        return (
            _onednn(grad_RO, weight_OI.t()).reshape(x.shape) if wanted_x else None,
            _onednn(grad_RO.t(), x_RI.t()) if wanted_weight else None,
            grad_RO.sum(0) if wanted_bias else None,
        )


def _onednn(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_OI.detach(), bias_O, "none", [], "")
    return out


def _suits(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= _MIN_WEIGHTS


@lru_cache
def _onednn_pays() -> bool:
    """Measured on this processor, once."""
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    x, weight = torch.randn(256, 512), torch.randn(1024, 512)
    return _seconds(lambda: [_onednn(x, weight)]) < 0.9 * _seconds(lambda: [F.linear(x, weight)])


def unpack(modules: Iterable[nn.Module]) -> None:
    """Take back what `prepack` changed."""
    for module in modules:
        vars(module).pop("forward", None)


def _is_faster(same: list[PackedLinear]) -> bool:
    """Whether prepacked weights win, for all layers of one shape in turn: so a weight has left the caches when its turn
    comes again, as in decoding."""
    own = library = 0.0
    for n in _ROWS_MEASURED:
        x = torch.randn(n, same[0].weight_OI.shape[1])
        own += _seconds(lambda x=x: [packed(x) for packed in same])  # type: ignore[misc]
        library += _seconds(lambda x=x: [F.linear(x, packed.weight_OI) for packed in same])  # type: ignore[misc]
    return own < library


def _seconds(run: Callable[[], list[Tensor]], repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
