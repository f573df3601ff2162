"""Heads with an unembedding of their own: lora and copied. The other kinds: test_spans."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, build, reference
from torch import Tensor, nn
from train_fixtures import t1

from hispec.attention import PackedAttention
from hispec.config import HeadConfig
from hispec.decode.decoder import Decoder
from hispec.decode.request import SamplingParams
from hispec.errors import ConfigError
from hispec.heads import Head, make_heads
from hispec.model import HiSpecModel
from hispec.trunk import Trunk

OWN: list[dict[str, Any]] = [{"kind": "lora", "rank": 3}, {"kind": "block", "unembedding": "copied"}]
IDS = torch.arange(0, VOCAB, 3)
PROMPT = [5, 17, 101, 33]


def model(name: str, own: dict[str, Any], reduced: bool, exits: tuple[int, ...] = (2, 4)) -> HiSpecModel:
    trunk = Trunk(build(name))
    configs = [HeadConfig.build(own | {"vocab_size": len(IDS) if reduced else None})] * len(exits)
    heads = make_heads(trunk, exits, configs, [IDS if reduced else None] * len(exits))
    return HiSpecModel(trunk, t1(size=VOCAB), heads, name)


def stir(heads: nn.ModuleList) -> None:
    """As if they had been trained."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))


def inputs(hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n = len(hidden_TD)
    return hidden_TD, torch.arange(n), torch.arange(n)


def logits(head: Head, hidden_TD: Tensor) -> Tensor:
    return head.logits(head.features(*inputs(hidden_TD), PackedAttention([len(hidden_TD)])))


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("own", OWN, ids=lambda own: own["kind"])
@pytest.mark.parametrize("name", ["llama_tied", "granite", "gemma2", "opt_post_proj"])
def test_training_and_decoding_read_the_same_logits(name: str, own: dict[str, Any], reduced: bool) -> None:
    """Tied trunks, scaled and capped logits, a projection: first the logit lens, then whatever was learned."""
    made = model(name, own, reduced)
    head = made.heads_list[0]
    before = {key: value.clone() for key, value in made.trunk.model.state_dict().items()}
    hidden_TD = made.trunk.run(torch.arange(7), torch.arange(7), 0, 2, PackedAttention([7]))
    attend = PackedAttention([7])
    lens_TV = head.shared(made.trunk.features(hidden_TD))
    assert torch.allclose(logits(head, hidden_TD), lens_TV, atol=1e-5)
    stir(made.heads)
    decoded_TV = logits(head, hidden_TD)
    trained_TV = head.read(head(*inputs(hidden_TD), torch.arange(7), attend))
    assert torch.allclose(decoded_TV, trained_TV, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(decoded_TV, lens_TV, atol=1e-2)
    assert torch.equal(head.shared(made.trunk.features(hidden_TD)), lens_TV)
    assert all(torch.equal(value, before[key]) for key, value in made.trunk.model.state_dict().items())


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("own", OWN, ids=lambda own: own["kind"])
def test_they_are_stored_small_come_back_and_decode_losslessly(
    tmp_path: Path, own: dict[str, Any], reduced: bool
) -> None:
    build("llama_tied").save_pretrained(tmp_path / "base")
    t1(size=VOCAB).save_pretrained(tmp_path / "base")
    made = model("llama_tied", own, reduced)
    made.base = str(tmp_path / "base")
    stir(made.heads)
    made.save_pretrained(tmp_path / "heads")
    loaded = HiSpecModel.from_pretrained(tmp_path / "heads")
    state = loaded.heads.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in made.heads.state_dict().items())
    width = len(IDS) if reduced else VOCAB
    if own["kind"] == "lora":
        shapes = {key: tuple(value.shape) for key, value in state.items() if key.startswith("0.") and "ids" not in key}
        assert shapes == {"0.norm.weight": (48,), "0.down.weight": (3, 48), "0.up.weight": (width, 3)}
    else:
        assert tuple(state["0.matrix"].shape) == (width, 48)
    wanted, _ = reference(build("llama_tied"), PROMPT, 24)
    decoder = Decoder(loaded)
    (got,) = decoder.generate([PROMPT], SamplingParams(max_new_tokens=24, ignore_eos=True))
    assert got.ids == wanted
    hidden_TD = torch.randn(4, 48)
    for ours, theirs in zip(made.heads_list, loaded.heads_list, strict=True):
        assert torch.allclose(logits(ours, hidden_TD), logits(theirs, hidden_TD), atol=1e-5)


def test_lora_without_peft_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "peft"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"lora needs peft; run: pip install 'hispec\[lora\]'"):
        model("llama_tied", {"kind": "lora"}, False)
    model("llama_tied", {"kind": "norm"}, False)


def test_peft_is_the_reference(tmp_path: Path) -> None:
    """The same update, merged into a copy of the matrix by peft itself."""
    made = model("llama_gqa", {"kind": "lora", "rank": 3}, False)
    stir(made.heads)
    head = made.heads_list[0]
    layer: Any = importlib.import_module("peft.tuners.lora.layer").Linear
    assert isinstance(head.unembed.matrix, layer)
    merged_VD = made.trunk.unembed.matrix.weight + head.unembed.matrix.get_delta_weight("default")
    features_SD = torch.randn(5, 48)
    assert torch.allclose(head.logits(features_SD), features_SD @ merged_VD.T, rtol=1e-4, atol=1e-5)


def test_lora_and_a_copied_unembedding_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="unembedding=shared"):
        HeadConfig.build({"kind": "lora", "unembedding": "copied"})
