"""Any split of a trunk into spans computes what the model computes whole."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_fixtures import assert_close, decode, greedy, random_heads, trunk, wanted, with_heads, write_base
from tiny_models import F1, GQA, build, reference
from torch import Tensor, nn
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hispec import Decoder, SamplingParams
from hispec.attention import PackedAttention
from hispec.base import load_base
from hispec.config import HeadConfig, check_exits, default_exits
from hispec.decode.cache import PagedAttention, Rows
from hispec.decode.hierarchy import make_cache, make_levels
from hispec.decode.sampling import gumbel
from hispec.errors import ConfigError, RequestError, UnsupportedModelError
from hispec.heads import FullHead, Head
from hispec.trunk import Trunk

IDS = torch.tensor([5, 17, 101, 33, 9, 150, 7, 88, 3, 3, 60, 12, 199, 42, 1, 77, 20, 21])
POSITIONS = torch.arange(len(IDS))
SPLITS = [(1,), (5,), (2, 4), (1, 2, 3, 4, 5)]


@torch.no_grad()
def full_logits(model: PreTrainedModel, ids_T: Tensor = IDS) -> Tensor:
    logits: Tensor = model(ids_T[None], use_cache=False).logits[0]
    return logits


def truncated(name: str, n: int) -> PreTrainedModel:
    """The model with its layers from `n` on taken out."""
    model = build(name)
    owner: Any = next(m for m in model.modules() if isinstance(getattr(m, "layers", None), nn.ModuleList))
    owner.layers = owner.layers[:n]
    model.config.num_hidden_layers = n
    return model


def llama(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**GQA | {"initializer_range": 0.3} | changes))
    model.train(False)
    return model


@torch.no_grad()
def split_logits(own: Trunk, exits: tuple[int, ...], ids_T: Tensor = IDS) -> Tensor:
    hidden_TD = None
    for start, stop in zip((0, *exits), (*exits, own.n_layers), strict=True):
        hidden_TD = own.run(ids_T, torch.arange(len(ids_T)), start, stop, PackedAttention([len(ids_T)]), hidden_TD)
    assert hidden_TD is not None
    return own.unembed(own.features(hidden_TD))


@pytest.mark.parametrize("name", F1)
def test_any_split_gives_the_full_models_logits(name: str) -> None:
    expected = full_logits(build(name))
    for exits in SPLITS:
        torch.testing.assert_close(split_logits(trunk(name), exits), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", F1)
def test_m01_an_exit_is_the_model_cut_off_there(name: str) -> None:
    own, packed = trunk(name), PackedAttention([len(IDS)])
    for exit_ in (2, 5, 6):
        head = Head(own, exit_, HeadConfig(kind="mlp"), 0)
        with torch.no_grad():
            got = head.logits(head.features(own.run(IDS, POSITIONS, 0, exit_, packed), IDS, POSITIONS, packed))
        torch.testing.assert_close(got, full_logits(truncated(name, exit_)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["norm", "mlp", "block"])
def test_m08_every_kind_of_head_starts_as_the_logit_lens(kind: Any) -> None:
    own, packed = trunk("qwen2_bias"), PackedAttention([len(IDS)])
    head = Head(own, 3, HeadConfig(kind=kind), 0)
    with torch.no_grad():
        got = head.logits(head.features(own.run(IDS, POSITIONS, 0, 3, packed), IDS, POSITIONS, packed))
    torch.testing.assert_close(got, full_logits(truncated("qwen2_bias", 3)), rtol=1e-5, atol=1e-5)


def test_m06_kv_pages_take_the_head_size_from_the_tensors() -> None:
    own = trunk("qwen3")
    assert {(s.heads, s.key_size, s.value_size) for s in own.kv_shapes} == {(2, 24, 24)}
    assert decode(own, random_heads(own, (2, 4), "block"), (2, 4)).ids == wanted("qwen3")


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_m07_kv_bytes_per_token(n_kv_heads: int) -> None:
    model = llama(num_key_value_heads=n_kv_heads)
    expected = reference(model, [5, 17, 101], 20)[0]
    own = Trunk(model)
    cache = make_cache(make_levels(own, []), 1)
    tensors = [*cache.keys.values(), *cache.values.values()]
    # One block, and the one that padding writes to.
    assert sum(t.numel() * t.element_size() for t in tensors) == 2 * 16 * (2 * 6 * n_kv_heads * 12 * 4)
    assert decode(own, random_heads(own, (2,), "mlp"), (3,), [[5, 17, 101]], 20).ids == [expected]


@pytest.mark.parametrize("name", ["opt_pre", "llama_gqa"])
def test_m09_positions_up_to_the_last_one_and_a_clear_error_past_it(name: str) -> None:
    prompt = list(range(1, 101))
    own = trunk(name)
    run = decode(own, random_heads(own, (2, 4), "mlp"), (4, 4), [prompt, prompt[:9], prompt[:17]], 28)
    assert run.ids == [greedy(name, tuple(p), 28) for p in (prompt, prompt[:9], prompt[:17])]
    decoder = Decoder(with_heads(own))
    with pytest.raises(RequestError, match="100 tokens and max_new_tokens=29 exceed the model's 128 positions"):
        decoder.generate([prompt], SamplingParams(max_new_tokens=29))
    decoder.close()


def capped(n_layers: int = 6) -> PreTrainedModel:
    """gemma2 with both caps at 1.0 and its first layers only, on the library's eager attention."""
    model = truncated("gemma2", n_layers)
    model.config.attn_logit_softcapping = model.config.final_logit_softcapping = 1.0
    for module in model.modules():
        if hasattr(module, "attn_logit_softcapping"):
            module.attn_logit_softcapping = 1.0  # type: ignore[assignment]
    model.set_attn_implementation("eager")
    return model


def test_m13_soft_caps_are_kept_everywhere() -> None:
    expected = full_logits(capped())
    assert float((expected - full_logits(build("gemma2"))).abs().max()) > 0.1
    own = Trunk(capped())
    for exits in SPLITS:
        torch.testing.assert_close(split_logits(own, exits), expected, rtol=1e-5, atol=1e-5)
    assert float(FullHead(own).logits(torch.full((1, 48), 1e6)).max()) <= 1.0
    packed = PackedAttention([len(IDS)])
    for exit_ in (2, 4):
        got = own.unembed(own.features(own.run(IDS, POSITIONS, 0, exit_, packed))).log_softmax(-1)
        torch.testing.assert_close(got, full_logits(capped(exit_)).log_softmax(-1), rtol=1e-5, atol=1e-5)
    # A seeded run draws from exactly these logits.
    [ids] = decode(own, random_heads(own, (2, 4), "mlp"), (2, 4), [IDS.tolist()], 20, temperature=1.0, seed=3).ids
    scores_TV = full_logits(capped(), torch.tensor([*IDS.tolist(), *ids]))[len(IDS) - 1 : -1]
    noise_TV = torch.stack([gumbel(3, len(IDS) + at, 211, torch.device("cpu")) for at in range(20)])
    assert (scores_TV + noise_TV).argmax(-1).tolist() == ids


ROPES: list[dict[str, Any]] = [
    {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
]  # fmt: skip


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: str(rope["rope_type"]))
def test_m15_rope_scaling_is_the_librarys(rope: dict[str, Any]) -> None:
    model = llama(rope_parameters=rope)
    ids_T = torch.arange(101) % 97 + 5
    prompt = ids_T.tolist()
    expected, ids = full_logits(model, ids_T), reference(model, prompt, 20)[0]
    own = Trunk(model)
    for exits in ((), (2, 4)):
        torch.testing.assert_close(
            split_logits(own, exits, ids_T)[[5, 40, 100]], expected[[5, 40, 100]], rtol=1e-5, atol=1e-5
        )
        assert decode(own, random_heads(own, exits, "mlp"), (2, 4), [prompt], 20).ids == [ids]


def test_m15_an_unknown_rope_is_refused_in_one_line(tmp_path: Path) -> None:
    config = json.loads((write_base(tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}})
    )
    with pytest.raises(UnsupportedModelError, match="cannot build it from its config .*spiral") as caught:
        load_base(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_m16_old_and_new_configs_are_the_same_model(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    llama(rope_parameters=rope).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())

    def logits() -> Tensor:
        return Trunk(LlamaForCausalLM.from_pretrained(tmp_path)).logits(torch.arange(61) + 5)[60]

    new = logits()
    for key in ("rope_parameters", "dtype"):
        del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32", "rope_theta": 500000.0}))
    torch.testing.assert_close(logits(), new)
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    assert float((logits() - new).abs().max()) > 1e-3, "the base matters at this position"
    # Nowhere is the base read off a config by hand, where a default could stand in for it.
    rooms = Path(__file__).parents[1]
    assert not [
        f.name
        for room in ("hispec", "decode", "train")
        for f in (rooms / room).glob("*.py")
        if "rope_theta" in f.read_text()
    ]


@pytest.mark.parametrize("name", ["llama_gqa", "opt_pre", "mistral_sw8"])
@torch.inference_mode()
def test_m23_cached_steps_see_true_positions(name: str) -> None:
    own = trunk(name)
    heads = [Head(own, 2, HeadConfig(kind="mlp"), 0)]
    cache = make_cache(make_levels(own, heads), 2)
    for step, token in enumerate(IDS.tolist()):
        attend = PagedAttention(cache, [Rows([1, 0], step, step + 1)])
        ids_T, positions_T = torch.tensor([token]), torch.tensor([step])
        got = heads[0].logits(heads[0].features(own.run(ids_T, positions_T, 0, 2, attend), ids_T, positions_T, attend))
        packed = PackedAttention([step + 1])
        whole = own.run(IDS[: step + 1], POSITIONS[: step + 1], 0, 2, packed)
        assert_close(got[0], own.unembed(own.features(whole))[-1])


def test_m24_use_cache_false_in_the_config_changes_nothing() -> None:
    model = build("llama_gqa")
    model.config.use_cache = False
    own = Trunk(model)
    assert decode(own, random_heads(own, (2, 4), "mlp"), (2, 4)).ids == wanted("llama_gqa")


def test_a_model_without_replaceable_attention_is_refused_in_one_line() -> None:
    model = BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=16, n_layer=2, n_head=2))
    with pytest.raises(UnsupportedModelError, match="'bloom' do not let their attention be replaced") as caught:
        Trunk(model)
    assert "\n" not in str(caught.value)


def test_t01_the_trunk_has_no_dropout_and_no_gradient() -> None:
    own = Trunk(build("opt_pre").train())
    assert torch.equal(own.logits(IDS), own.logits(IDS))
    assert not any(parameter.requires_grad for parameter in own.model.parameters())


@pytest.mark.parametrize(
    ("exits", "message"),
    [
        ([2, 2], "names an exit twice"),
        ([-1], "-1 is out of range"),
        ([0], "0 is out of range"),
        ([6], "6 is out of range"),
        ([7], "7 is out of range"),
        ([4, 2], r"must rise from shallow to deep; write \[2, 4\]"),
    ],
)
def test_m21_exits_are_checked(exits: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_exits(exits, 6)


def test_m21_legal_exits_and_defaults() -> None:
    assert check_exits([], 6) == () and check_exits([1, 5], 6) == (1, 5)
    assert default_exits(4) == (1, 2) and default_exits(30) == (4, 8) and default_exits(2) == (1,)
