"""Every family: span by span, at every exit and through the engine, what the library's own forward says."""

import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_fixtures import N_BLOCKS, PROMPTS, assert_close, byte_tokenizer, decode, decoding, with_heads
from family_models import FAMILIES
from tiny_models import GQA, make, reference
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BloomConfig,
    CLIPVisionConfig,
    DiffLlamaConfig,
    FalconConfig,
    Gemma3Config,
    Gemma3TextConfig,
    GptOssConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    LlavaConfig,
    MambaConfig,
    Mistral3Config,
    MistralConfig,
    Phi3Config,
    PixtralVisionConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2VLConfig,
    SiglipVisionConfig,
    T5Config,
)

from hispec import HiSpecModel, SamplingParams
from hispec.attention import PackedAttention
from hispec.base import load_base
from hispec.config import HeadConfig
from hispec.decode.cache import PagedAttention, Rows
from hispec.decode.hierarchy import make_cache, make_levels
from hispec.errors import ConfigError, RequestError, UnsupportedModelError
from hispec.heads import Head
from hispec.trunk import Trunk

# 1, 7 and 33 ids; with 40 new ones they cross block edges (16) and windows (8).
OWN_PROMPTS = [PROMPTS[0], PROMPTS[2], PROMPTS[3]]
N_NEW = 40
IDS = torch.tensor(PROMPTS[3] + PROMPTS[2])


@cache
def trunk(name: str) -> Trunk:
    return Trunk(make(FAMILIES[name]))


@cache
def greedy(name: str) -> list[list[int]]:
    model = make(FAMILIES[name])
    return [reference(model, prompt, N_NEW)[0] for prompt in OWN_PROMPTS]


def truncated(model: PreTrainedModel, n: int) -> PreTrainedModel:
    """The model with its layers from `n` on taken out."""
    owner, name = next(
        (owner, name) for owner in model.modules() for name, m in owner.named_children() if isinstance(m, nn.ModuleList)
    )
    setattr(owner, name, getattr(owner, name)[:n])
    model.config.num_hidden_layers = n
    return model


@torch.no_grad()
def logits_of(model: PreTrainedModel) -> Tensor:
    logits: Tensor = model(IDS[None], use_cache=False).logits[0]
    return logits


def shared_heads(own: Trunk, exits: tuple[int, ...]) -> list[Head]:
    """What heads=shared puts at the exits: the final norm and the unembedding."""
    return [Head(own, exit_, HeadConfig(kind="norm"), slot) for slot, exit_ in enumerate(exits)]


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_every_exit_is_the_model_cut_off_there_and_the_last_level_is_the_model(name: str) -> None:
    own, packed, hidden_TD = trunk(name), PackedAttention([len(IDS)]), None
    heads = shared_heads(own, (1, 2, 3, 4, 5, 6))
    positions_T = torch.arange(len(IDS))
    for head in heads:
        hidden_TD = own.run(IDS, positions_T, head.exit - 1, head.exit, packed, hidden_TD)
        got = head.logits(head.features(hidden_TD, IDS, positions_T, packed))
        assert_close(got, logits_of(truncated(make(FAMILIES[name]), head.exit)))
    assert hidden_TD is not None
    expected = logits_of(make(FAMILIES[name]))
    assert_close(own.unembed(own.features(hidden_TD)), expected)
    assert_close(own.logits(IDS), expected)


@pytest.mark.parametrize("exits", [(), (2,), (2, 4)], ids=["plain", "one_exit", "two_exits"])
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_decoding_is_the_librarys_own_without_a_cache(name: str, exits: tuple[int, ...]) -> None:
    own = trunk(name)
    assert decode(own, shared_heads(own, exits), (3, 4), OWN_PROMPTS, N_NEW).ids == greedy(name)


@pytest.mark.parametrize("name", FAMILIES)
def test_models_of_this_table_say_more_than_one_word(name: str) -> None:
    assert len({token for ids in greedy(name) for token in ids}) >= 10


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_paged_and_piece_by_piece_is_whole_and_dense(name: str) -> None:
    own = trunk(name)
    cache_ = make_cache(make_levels(own, []), N_BLOCKS)
    whole_TD = own.run(IDS, torch.arange(len(IDS)), 0, 6, PackedAttention([len(IDS)]))
    table = [9, 2, 30]
    # Single tokens, a piece inside a block, one that ends at its edge, one over two edges, and the rest.
    edges = [0, 1, 2, 7, 16, 33, 34, len(IDS)]
    for start, stop in zip(edges, edges[1:], strict=False):
        attend = PagedAttention(cache_, [Rows(table, start, stop)])
        hidden_TD = None
        for first, last in ((0, 2), (2, 3), (3, 6)):
            hidden_TD = own.run(IDS[start:stop], torch.arange(start, stop), first, last, attend, hidden_TD)
        assert hidden_TD is not None
        # OPT's weights are so large here that rounding grows from layer to layer.
        torch.testing.assert_close(hidden_TD, whole_TD[start:stop], rtol=0, atol=1e-4 * float(whole_TD.abs().max()))


@pytest.mark.parametrize("name", ["opt_post_proj", "gemma3"])
def test_shared_heads_are_saved_and_loaded_where_a_trunk_has_no_final_norm_too(name: str, tmp_path: Path) -> None:
    make(FAMILIES[name]).save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    HiSpecModel.from_base(tmp_path / "base", (1, 2, 4)).save_pretrained(tmp_path / "heads")
    model = HiSpecModel.from_pretrained(tmp_path / "heads", exits=(2, 4))
    assert model.exits == (2, 4)
    with decoding(model, policy="fixed:3,4") as decoder:
        done = decoder.generate(OWN_PROMPTS, SamplingParams(max_new_tokens=N_NEW, ignore_eos=True))
    assert [completion.ids for completion in done] == greedy(name)


# Rope that depends on how long the text has become.


def test_dynamic_rope_is_exact_to_the_last_position_and_ends_there() -> None:
    # Up to max_position_embeddings its angles are those of plain rope; past it, keys that are kept would be wrong.
    own, prompt = trunk("llama_rope_dynamic"), [*range(5, 105)]
    expected = reference(make(FAMILIES["llama_rope_dynamic"]), prompt, 28)[0]
    assert decode(own, shared_heads(own, (2, 4)), (3, 4), [prompt, prompt[:3]], 28).ids[0] == expected
    with (
        decoding(with_heads(own)) as decoder,
        pytest.raises(RequestError, match="exceed the model's 128 positions"),
    ):
        decoder.generate([prompt], SamplingParams(max_new_tokens=29))


def test_longrope_is_exact_where_it_does_not_change_and_ends_there(caplog: pytest.LogCaptureFixture) -> None:
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [2.0, 4.0, 6.0, 8.0, 9.0, 9.5],
    }  # fmt: skip

    def phi3() -> PreTrainedModel:
        return make(
            (lambda: Phi3Config(**GQA, rope_parameters=rope, original_max_position_embeddings=64), 0.3, 0.3, 0, 1)
        )

    prompt = list(range(5, 41))
    expected = reference(phi3(), prompt, 28)[0]
    with caplog.at_level(logging.WARNING, "hispec"):
        own = Trunk(phi3())
    assert "exact decoding ends there, not at 128" in caplog.text and own.max_positions == 64
    assert decode(own, shared_heads(own, (2, 4)), (3, 4), [prompt, prompt[:3]], 28).ids[0] == expected
    with decoding(with_heads(own)) as decoder, pytest.raises(RequestError, match="exceed the model's 64 positions"):
        decoder.generate([prompt], SamplingParams(max_new_tokens=29))


# What is refused.

SMALL: dict[str, Any] = GQA | {"num_hidden_layers": 4}
REFUSED: dict[str, tuple[PretrainedConfig, str]] = {
    "bloom": (BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=2), "do not let their attention be"),
    "falcon": (
        FalconConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2),
        "do not let their attention be replaced",
    ),
    "mamba": (
        MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2), "do not let their attention be replaced",
    ),
    # Masks of its own making, that its attention is not told of.
    "chunks": (
        Llama4TextConfig(
            **SMALL, intermediate_size_mlp=96, head_dim=12, num_local_experts=2, attention_chunk_size=8,
            layer_types=["chunked_attention", "full_attention"] * 2, moe_layers=[],
        ),
        "sees chunked_attention",
    ),
    "window_in_the_mask_only": (
        Qwen2MoeConfig(
            **SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=2, num_experts=2,
            num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        ),
        r"sees sliding_attention \(window 8\), and does not tell its attention so \(window None\)",
    ),
    "sinks": (
        GptOssConfig(**SMALL, head_dim=12, num_local_experts=2, num_experts_per_tok=1), "does not know .*s_aux",
    ),
    "attends_twice": (DiffLlamaConfig(**SMALL), "run piece by piece, .*attend twice"),
    "convolutions": (Lfm2Config(**SMALL, layer_types=["conv", "full_attention"] * 2), "'lfm2'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_come_out_wrong_is_refused_in_one_line(name: str) -> None:
    config, said = REFUSED[name]
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with pytest.raises(UnsupportedModelError, match=said) as caught:
        Trunk(model.float())
    assert "\n" not in str(caught.value)


def test_an_encoder_decoder_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    T5Config(vocab_size=64, d_model=16, d_ff=16, num_layers=2, num_heads=2).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError) as caught:
        load_base(str(tmp_path))
    assert "\n" not in str(caught.value)


# Multi-modal models.

PIXELS: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 6, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
TEXT: dict[str, Any] = GQA | {"vocab_size": 258, "head_dim": 12}
WRAPPERS: dict[str, PretrainedConfig] = {
    "gemma3": Gemma3Config(
        text_config=Gemma3TextConfig(**TEXT, sliding_window=8), vision_config=SiglipVisionConfig(**PIXELS),
        mm_tokens_per_image=4, image_token_index=250, boi_token_index=251, eoi_token_index=252,
    ),
    "llava": LlavaConfig(
        text_config=LlamaConfig(**TEXT), vision_config=CLIPVisionConfig(**PIXELS), image_token_index=250
    ),
    "mistral3": Mistral3Config(
        text_config=MistralConfig(**TEXT), vision_config=PixtralVisionConfig(**PIXELS), image_token_index=250
    ),
}  # fmt: skip


def write(config: PretrainedConfig, folder: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    model: Any = AutoModelForImageTextToText.from_config(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    model.float().eval().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    result: PreTrainedModel = model
    return result


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_language_model_inside_a_multimodal_one_is_decoded(name: str, tmp_path: Path) -> None:
    whole = write(WRAPPERS[name], tmp_path)
    prompt = PROMPTS[2]
    model = HiSpecModel.from_base(tmp_path, (2, 4))
    assert_close(model.trunk.logits(torch.tensor(prompt)), whole(torch.tensor([prompt])).logits[0].detach())
    with decoding(model, policy="fixed:2,4") as decoder:
        [completion] = decoder.generate([prompt], SamplingParams(max_new_tokens=20, ignore_eos=True))
    assert completion.ids == reference(whole, prompt, 20)[0]
    assert not any("vision" in key for key, _ in model.trunk.model.named_parameters())


def test_a_multimodal_model_whose_language_model_cannot_stand_alone_is_refused(tmp_path: Path) -> None:
    text = TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}}
    vision = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 48, "patch_size": 4}
    write(Qwen2VLConfig(text_config=text, vision_config=vision), tmp_path)
    with pytest.raises(UnsupportedModelError, match="'qwen2_vl' model.* cannot stand alone; give a text model"):
        load_base(str(tmp_path))


def test_m21_exits_of_a_multimodal_model_count_its_language_layers(tmp_path: Path) -> None:
    WRAPPERS["llava"].save_pretrained(tmp_path)  # no weights: exits are checked before
    with pytest.raises(ConfigError, match=r"6 is out of range; legal exits of this model are 1..5"):
        HiSpecModel.from_base(tmp_path, (2, 6))
