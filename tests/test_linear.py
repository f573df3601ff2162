"""The packed linear layer is F.linear, whatever happens to its weight."""

import pytest
import torch
import torch.nn.functional as F
from decode_fixtures import PROMPTS, decoding, trunk, wanted, with_heads
from torch import nn

from hispec import SamplingParams, linear
from hispec.linear import PackedLinear, prepack, product, quicken, unpack

HAS_ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
pytestmark = pytest.mark.skipif(not HAS_ONEDNN, reason="torch without oneDNN has nothing to pack")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 48), (4, 48), (1, 7, 48), (300, 48), (0, 48)])
@torch.no_grad()
def test_packed_is_linear(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(48, 211, bias=bias)
    x = torch.randn(shape)
    torch.testing.assert_close(PackedLinear(layer.weight, layer.bias)(x), F.linear(x, layer.weight, layer.bias))


@torch.no_grad()
def test_packed_follows_a_weight_that_changes() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(48, 32), torch.randn(3, 48)
    packed = PackedLinear(layer.weight, layer.bias)
    before = packed(x)
    layer.weight.mul_(2.0)
    torch.testing.assert_close(packed(x), layer(x))
    layer.weight.data = torch.randn(32, 48)
    torch.testing.assert_close(packed(x), layer(x))
    assert not torch.allclose(packed(x), before)


def test_packed_lets_gradients_through() -> None:
    layer, x = nn.Linear(8, 5), torch.randn(3, 8, requires_grad=True)
    got = torch.autograd.grad(PackedLinear(layer.weight, layer.bias)(x).sum(), [x, layer.weight])
    torch.testing.assert_close(got[0], layer.weight.sum(0).expand(3, 8).detach())
    torch.testing.assert_close(got[1], x.sum(0).expand(5, 8).detach())


def test_prepack_takes_plain_fp32_layers_only_and_unpack_takes_back() -> None:
    model = nn.ModuleList([nn.Linear(512, 2048), nn.Linear(8, 8).bfloat16(), nn.Embedding(4, 4), nn.LayerNorm(4)])
    changed = prepack([model, model])
    # Which layers gain depends on the machine; which may be touched does not.
    assert set(changed) <= {model[0]} and len(changed) <= 1
    if changed:
        assert prepack([model]) == [], "packed twice"
    unpack(changed)
    assert not any("forward" in vars(module) for module in model)


def test_a_packed_model_says_the_same_and_is_given_back() -> None:
    own = trunk("llama_gqa")
    linears = [m for m in own.model.modules() if isinstance(m, nn.Linear) and "forward" not in vars(m)]
    with decoding(with_heads(own, (2, 4))) as decoder:
        for module in linears:
            # Packed even where it is not faster here.
            module.forward = PackedLinear(module.weight, module.bias)  # type: ignore[method-assign, assignment]
            decoder._packed.append(module)
        got = decoder.generate(PROMPTS, SamplingParams(max_new_tokens=16, ignore_eos=True))
        assert [completion.ids for completion in got] == wanted("llama_gqa", PROMPTS, 16)
    assert not any("forward" in vars(module) for module in linears)


@pytest.fixture
def onednn_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this processor says, and for layers of any size."""
    monkeypatch.setattr(linear, "_onednn_pays", lambda: True)
    monkeypatch.setattr(linear, "_MIN_WEIGHTS", 0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 48), (1, 7, 48), (300, 48)])
def test_products_of_training_have_the_librarys_gradients(
    shape: tuple[int, ...], bias: bool, onednn_pays: None
) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(48, 211, bias=bias), torch.randn(shape, requires_grad=True)
    leaves = [x, *layer.parameters()]
    own, dull = product(x, layer.weight, layer.bias), F.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(own, dull)
    grad = torch.randn_like(dull)
    for ours, theirs in zip(
        torch.autograd.grad(own, leaves, grad), torch.autograd.grad(dull, leaves, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_quickened_layers_follow_their_weights_and_packed_ones_have_gradients(onednn_pays: None) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(48, 32), torch.randn(3, 48, requires_grad=True)
    packed = PackedLinear(layer.weight.detach(), None)
    (grad,) = torch.autograd.grad(packed(x).sum(), x)
    torch.testing.assert_close(grad, layer.weight.sum(0).expand(3, 48))
    quicken(nn.Sequential(layer))
    assert "forward" in vars(layer)
    with torch.no_grad():
        layer.weight.mul_(2.0)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
    unpack([layer])
    assert "forward" not in vars(layer)


def test_half_precision_stays_the_librarys(onednn_pays: None) -> None:
    layer = nn.Linear(48, 32, dtype=torch.bfloat16)
    quicken(layer)
    assert "forward" not in vars(layer)
    assert torch.equal(
        product(torch.ones(2, 48).bfloat16(), layer.weight), F.linear(torch.ones(2, 48).bfloat16(), layer.weight)
    )
