"""The heads folder: what is written is what is read, and what does not fit is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_fixtures import byte_tokenizer, decoding, random_heads, scripted, write_base
from safetensors.torch import load_file, save_file
from tiny_models import GQA
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hispec import HiSpecModel, SamplingParams
from hispec.attention import PackedAttention
from hispec.base import new_folder
from hispec.config import HeadConfig, HeadKind
from hispec.decode.prompts import chat_ids
from hispec.errors import BaseMismatchError, CheckpointError, FileError
from hispec.heads import make_heads
from hispec.trunk import Trunk

IDS = torch.arange(9) + 5
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


def make(base: Path, kind: HeadKind = "mlp", exits: tuple[int, ...] = (2, 4), vocab: int | None = None) -> HiSpecModel:
    """A model whose heads are away from where they start."""
    model = HiSpecModel.from_base(str(base))
    ids = None if vocab is None else torch.arange(vocab) * 3
    model.heads = nn.ModuleList(random_heads(model.trunk, exits, kind, ids))
    return model


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    """A good heads folder, to be spoilt."""
    make(base).save_pretrained(tmp_path / "heads")
    return tmp_path / "heads"


def logits(model: HiSpecModel) -> list[torch.Tensor]:
    """What each head says."""
    positions, out = torch.arange(len(IDS)), []
    for head in model.heads_list:
        packed = PackedAttention([len(IDS)])
        hidden = model.trunk.run(IDS, positions, 0, head.exit, packed)
        with torch.no_grad():
            out.append(head.logits(head.features(hidden, IDS, positions, packed)))
    return out


@pytest.mark.parametrize("kind", ["norm", "mlp", "block"])
@pytest.mark.parametrize("vocab", [None, 40])
def test_c01_saved_heads_come_back(base: Path, tmp_path: Path, kind: HeadKind, vocab: int | None) -> None:
    model = make(base, kind, vocab=vocab)
    model.training, model.metrics = {"steps": 3}, {"exits": [{"exit": 2, "top1": 0.5}], "length": 1.5}
    model.save_pretrained(tmp_path / "heads")
    loaded = HiSpecModel.from_pretrained(tmp_path / "heads")
    assert loaded.exits == (2, 4) and [h.config for h in loaded.heads_list] == [h.config for h in model.heads_list]
    assert (loaded.training, loaded.metrics) == (model.training, model.metrics)
    for got, expected in zip(logits(loaded), logits(model), strict=True):
        assert torch.equal(got, expected)
    stored = load_file(tmp_path / "heads" / "model.safetensors")
    assert stored.keys() == model.heads.state_dict().keys(), "heads only, every tensor once"
    card = (tmp_path / "heads" / "README.md").read_text()
    assert "library_name: hispec" in card and "| 2 | 50.0% | not measured |" in card


def test_c01_heads_as_they_start_and_tied_bases_are_saved(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", tie_word_embeddings=True)
    model = HiSpecModel.from_base(str(base), (2, 4))
    a, b = model.heads_list
    b.norm = a.norm  # two heads sharing one norm
    model.save_pretrained(tmp_path / "heads")
    for got, expected in zip(logits(HiSpecModel.from_pretrained(tmp_path / "heads")), logits(model), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_c06_all_tensors_have_the_announced_dtype(base: Path, tmp_path: Path, dtype: torch.dtype | None) -> None:
    model = make(base, "block", vocab=40)
    model.save_pretrained(tmp_path / "heads", dtype)
    tensors = load_file(tmp_path / "heads" / "model.safetensors")
    announced = json.loads((tmp_path / "heads" / "config.json").read_text())["dtype"]
    assert {str(t.dtype) for t in tensors.values() if t.is_floating_point()} == {f"torch.{announced}"}
    assert announced == str(dtype or torch.float32).removeprefix("torch.")
    assert HiSpecModel.from_pretrained(tmp_path / "heads").heads_list[0].out.weight.dtype == torch.float32


def test_p07_heads_follow_the_dtype_of_the_base(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**GQA | {"vocab_size": len(byte_tokenizer())})
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    for dtype, expected in ((None, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)):
        model = HiSpecModel.from_base(str(tmp_path / "base"), (2,), HeadConfig(kind="mlp"), dtype=dtype)
        assert {p.dtype for p in [*model.trunk.model.parameters(), *model.heads.parameters()]} == {expected}


def test_p08_size_grows_by_the_heads_only(base: Path, tmp_path: Path) -> None:
    sizes = []
    for exits in ((1,), (1, 2, 3, 4)):
        model = make(base, "norm", exits)
        model.save_pretrained(tmp_path / "heads")
        sizes.append((tmp_path / "heads" / "model.safetensors").stat().st_size)
        trunk: Any = model.trunk.model
        unembeddings: list[Any] = [head.unembed.wrapper for head in model.heads_list]
        assert {wrapper.lm_head.weight.data_ptr() for wrapper in unembeddings} == {trunk.lm_head.weight.data_ptr()}
    assert sizes[1] - sizes[0] < 3 * (48 * 4 + 200), "a norm each, and its name"


def spoil(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({"module.0.norm.weight": t.pop("0.norm.weight")}), r"'0.norm.weight' is missing"),
        (lambda t: t.update(extra=torch.zeros(2)), r"'extra' belongs to no head"),
        (
            lambda t: t.update({"1.norm.weight": torch.zeros(3)}),
            r"'1.norm.weight' has shape \[3\], the heads need \[48\]",
        ),
    ],
)
def test_c07_keys_must_match(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any], message: str) -> None:
    spoil(folder, change)
    with pytest.raises(CheckpointError, match=message):
        HiSpecModel.from_pretrained(folder)


def test_c07_a_vocabulary_that_only_one_file_knows(folder: Path) -> None:
    spoil(folder, lambda t: t.update({"0.vocab_ids": torch.arange(4)}))
    with pytest.raises(CheckpointError, match="disagree on the vocabulary of exit 2"):
        HiSpecModel.from_pretrained(folder)


def test_damaged_and_missing_files_are_refused(folder: Path, base: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for damage in (whole[:-100], whole[:5], b""):
        weights.write_bytes(damage)
        with pytest.raises(CheckpointError, match="model.safetensors is damaged"):
            HiSpecModel.from_pretrained(folder)
    weights.unlink()
    with pytest.raises(CheckpointError, match="has no model.safetensors"):
        HiSpecModel.from_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        HiSpecModel.from_pretrained(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="has no config.json"):
        HiSpecModel.from_pretrained(folder)
    with pytest.raises(CheckpointError, match="does not describe hispec heads"):
        HiSpecModel.from_pretrained(base)
    with pytest.raises(FileError, match="no such folder"):
        HiSpecModel.from_pretrained(folder / "nowhere")


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads((folder / "config.json").read_text())
    change(data)
    (folder / "config.json").write_text(json.dumps(data))


def test_c13_unknown_format_versions_are_refused_and_a_missing_one_is_the_first(folder: Path) -> None:
    edit(folder, lambda data: data.pop("format_version"))
    assert HiSpecModel.from_pretrained(folder).exits == (2, 4)
    edit(folder, lambda data: data.update(format_version=99))
    with pytest.raises(CheckpointError, match="has format_version 99; this hispec reads 1"):
        HiSpecModel.from_pretrained(folder)
    edit(folder, lambda data: data.update(format_version=1, heats=[]))
    with pytest.raises(CheckpointError, match="unknown key 'heats'; did you mean 'heads'"):
        HiSpecModel.from_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, "lm_head"),
        ({"num_hidden_layers": 5}, "n_layers is 6"),
        ({"hidden_size": 32}, "hidden_size"),
        ({"vocab_size": 300}, "vocab_size"),
    ],
)
def test_c11_heads_of_another_base_are_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    other = write_base(tmp_path / "other", **changes)
    with pytest.raises(BaseMismatchError, match=f"trained on another model: {named}"):
        HiSpecModel.from_pretrained(folder, base=str(other))


def test_c11_base_and_exits_are_readable_in_one_json_and_precision_is_no_other_base(folder: Path, base: Path) -> None:
    data = json.loads((folder / "config.json").read_text())
    assert data["base"]["id"] == str(base) and [h["exit"] for h in data["heads"]] == [2, 4]
    assert HiSpecModel.from_pretrained(folder, dtype=torch.bfloat16).trunk.dtype == torch.bfloat16


def test_c08_the_template_trained_with_goes_along(base: Path, tmp_path: Path) -> None:
    model = make(base)
    model.tokenizer.chat_template = TEMPLATE
    model.save_pretrained(tmp_path / "heads")
    base.rename(tmp_path / "moved")
    try:
        loaded = HiSpecModel.from_pretrained(tmp_path / "heads", base=str(tmp_path / "moved"))
        with pytest.raises(FileError, match="no such folder"):
            HiSpecModel.from_pretrained(tmp_path / "heads")
    finally:
        (tmp_path / "moved").rename(base)
    chat = [{"role": "user", "content": "hi"}]
    tokenizer: Any = loaded.tokenizer
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<user>hi"
    assert chat_ids(tokenizer, chat) == byte_tokenizer()("<user>hi").input_ids
    assert json.loads((tmp_path / "heads" / "config.json").read_text())["chat_template_sha256"]


def test_c10_stop_tokens_of_the_generation_config_go_along(tmp_path: Path) -> None:
    scripted([4, 5, 6, 8, 9, 4, 4, 2], len(byte_tokenizer())).save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    model = HiSpecModel.from_base(str(tmp_path / "base"), (1, 2))
    model.generation.eos_token_id = [2, 9]
    model.save_pretrained(tmp_path / "heads")
    with decoding(HiSpecModel.from_pretrained(tmp_path / "heads")) as decoder:
        [completion] = decoder.generate([[3]], SamplingParams(max_new_tokens=20))
    assert (completion.ids, completion.finish_reason) == ([4, 5, 6, 8, 9], "stop")


def test_a_failing_write_leaves_the_old_folder(base: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ZeroDivisionError), new_folder(folder) as new:
        (new / "config.json").write_text("half")
        raise ZeroDivisionError
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["heads"], "nothing is left lying about"
    make(base, "norm").save_pretrained(folder)  # and a good one replaces it whole
    assert (folder / "model.safetensors").read_bytes() != before["model.safetensors"]
    assert [path.name for path in folder.parent.iterdir()] == ["heads"]


def test_an_unwritable_place_is_one_line(base: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot write to"):
        make(base).save_pretrained(tmp_path / "file" / "heads")


def test_heads_of_any_kind_decode_after_a_round_trip(base: Path, tmp_path: Path) -> None:
    trunk = Trunk(LlamaForCausalLM.from_pretrained(base))
    heads = make_heads(
        trunk, (1, 2, 4), [HeadConfig(kind="block"), HeadConfig(kind="norm"), HeadConfig(kind="mlp", width=1.5)]
    )
    model = HiSpecModel(trunk, byte_tokenizer(), heads, str(base))
    model.save_pretrained(tmp_path / "heads")
    loaded = HiSpecModel.from_pretrained(tmp_path / "heads")
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    with decoding(loaded) as decoder, decoding(model, exits=()) as plain:
        assert decoder.generate("Once upon", params)[0].ids == plain.generate("Once upon", params)[0].ids
