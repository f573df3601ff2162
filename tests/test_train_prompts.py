"""Prompts that need no data set: those the trunk writes itself, and functions of Python's own library."""

import ast
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from several_ranks import in_ranks
from tiny_models import VOCAB, build
from torch import nn
from train_fixtures import PLAIN, config, model_folder, t1

from hispec.errors import DataError
from hispec.model import HiSpecModel
from hispec.train import packaged, setup
from hispec.train.cli import run
from hispec.train.config import TrainConfig
from hispec.train.data_config import DataConfig
from hispec.train.masks import encode_prompt, encode_text
from hispec.train.own_prompts import OwnPrompts, opening_of
from hispec.train.tiny import tiny_tokenizer
from hispec.train.tokens import TokenCache, prompt_ids
from hispec.trunk import Trunk

INST = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content | trim }} [/INST]{% endfor %}"


def untrained(template: str | None = PLAIN) -> HiSpecModel:
    return HiSpecModel(Trunk(build("llama_gqa")), t1(template, VOCAB), nn.ModuleList(), "llama_gqa")


def own(folder: Path, n: int = 16, template: str | None = PLAIN, seed: int = 0) -> OwnPrompts:
    data = DataConfig.build({"own_prompts": n, "answers": "trunk", "max_new_tokens": 8, "answer_batch": 5})
    return OwnPrompts(untrained(template), data, seed, folder)


def written(folder: Path) -> list[dict[str, Any]]:
    """All lines but the first of each file."""
    return [json.loads(line) for path in sorted(folder.iterdir()) for line in path.read_text().splitlines()[1:]]


def test_the_opening_ends_where_the_users_words_would_stand() -> None:
    opening = opening_of(t1())
    prompt = encode_prompt(t1(), [{"role": "user", "content": "hi there"}])
    assert opening.chat and prompt[: len(opening.ids) + 1] == [*opening.ids, 7]  # 7: hi
    assert opening.stop_ids == [6] == prompt[4:5] and not opening.stop
    opening = opening_of(t1(INST))
    assert (opening.stop_ids, opening.stop) == ([], ["[/INST]"])  # words end this turn, not a token
    opening = opening_of(t1(None))
    assert not opening.chat and opening.ids == [1]


def test_what_cannot_write_prompts_is_told() -> None:
    bare = t1(None)
    bare.bos_token = None
    with pytest.raises(DataError, match="neither a chat template nor a start token"):
        opening_of(bare)
    with pytest.raises(DataError, match="does not show what the user says"):
        opening_of(t1("{% for m in messages %}<|{{ m.role }}|>{% endfor %}"))
    with pytest.raises(DataError, match="refuses a single question .talk to me first"):
        opening_of(t1("{{ raise_exception('talk to me first') }}"))


def test_a_space_before_the_words_is_left_to_them() -> None:
    """A byte tokenizer would make a token of it, which the model has never seen before a word."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = INST
    assert tokenizer.decode(opening_of(tokenizer).ids) == "<s>[INST]"


def test_prompts_are_the_trunks_own_and_finished(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prompts = own(tmp_path, 24)
    prompts.write()
    with caplog.at_level(logging.INFO, logger="hispec"):
        rows = prompts.rows()
    lines = written(tmp_path)
    finished = {line["number"]: line for line in lines if line["ids"][-1] in (2, 6)}  # the model's own end, or a turn's
    assert len(lines) == 24 and 0 < len(finished) < 24
    assert not any({2, 6} & set(line["ids"][:-1]) for line in lines)
    assert {line["finish_reason"] for line in finished.values()} == {"stop"}
    texts = [finished[number]["text"] for number in sorted(finished) if finished[number]["text"]]
    assert [row.messages for row in rows] == [({"role": "user", "content": text},) for text in dict.fromkeys(texts)]
    assert f"{len(rows)} of 24 kept, {24 - len(finished)} did not end" in caplog.text


def test_an_interrupted_run_writes_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    alone = own(tmp_path / "alone")
    alone.write()
    shared = own(tmp_path / "shared")
    shared.write(0, 2)
    path = tmp_path / "shared" / "00000.jsonl"
    kept = path.read_text().split("\n")[:4]
    path.write_text("\n".join(kept) + '\n{"number": 8, "id')  # killed in the middle of a line
    for rank in range(3):
        shared.write(rank, 3)
    assert path.read_text().split("\n")[:4] == kept
    assert len(written(tmp_path / "shared")) == 16
    assert shared.rows() == alone.rows()
    more = own(tmp_path / "shared", 20)  # asking for more keeps what is there, for fewer takes the first
    more.write()
    assert more.rows()[: len(alone.rows())] == alone.rows()
    assert own(tmp_path / "shared", 8).rows() == [row for row in alone.rows() if int(row.where.split()[-1]) < 8]
    with pytest.raises(DataError, match="seed=0, this run has 1"):
        own(tmp_path / "shared", seed=1).write()


def test_unfinished_empty_and_repeated_prompts_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prompts = own(tmp_path, 6)
    prompts.write()
    path = tmp_path / "00000.jsonl"
    header = path.read_text().split("\n")[0]
    said = [("hi", "stop"), ("yes", "length"), (" \n", "stop"), ("hi\n", "stop"), ("ok", "error"), ("hi there", "stop")]
    lines = [json.dumps({"number": n, "text": text, "finish_reason": why}) for n, (text, why) in enumerate(said)]
    path.write_text("\n".join([header, *lines]) + "\n")
    with caplog.at_level(logging.INFO, logger="hispec"):
        assert [row.messages[0]["content"] for row in prompts.rows()] == ["hi", "hi there"]
    assert "2 of 6 kept, 2 did not end, 1 empty, 1 there already" in caplog.text
    path.write_text("\n".join([header, *lines[1:3]]) + "\n")
    with pytest.raises(DataError, match="none of the 6 .* can be used, 1 did not end, 1 empty; ask for more"):
        prompts.rows()


def test_without_a_chat_template_a_prompt_is_a_text_to_complete(tmp_path: Path) -> None:
    prompts = own(tmp_path, 8, None)
    prompts.write()
    rows = prompts.rows()
    by_number = {line["number"]: line for line in written(tmp_path)}
    assert rows and all(row.unfinished and not row.messages for row in rows)
    for row in rows:
        line = by_number[int(row.where.split()[-1])]
        assert len(line["ids"]) == 32 and 2 not in line["ids"] and row.text == line["text"]
    cache = TokenCache(tmp_path / "tokens", prompts.config, t1(None, VOCAB), 0, [row.text for row in rows])
    cache.write(iter(rows), 0, 1)
    assert cache.read().prompts == [encode_text(t1(None, VOCAB), row.text) for row in rows]


def settings(folder: Path, name: str, shard: str = "none") -> TrainConfig:
    data = {"own_prompts": 6, "answers": "trunk", "max_new_tokens": 4, "temperature": 1.0, "max_len": 120}
    return config(
        folder, folder / "llama_gqa", run_dir=str(folder / name), data=data, trunk__shard=shard,
        train__micro_batch_tokens=120,
    )  # fmt: skip


def learned_all(configs: list[TrainConfig]) -> list[Any]:
    return [learned(config) for config in configs]


def learned(config: TrainConfig) -> list[tuple[list[int], list[bool]]]:
    """The documents of a run."""
    tokenizer = setup.load_tokenizer(config, config.model)
    trunk = setup.load_trunk(config, config.model)
    plain = HiSpecModel(trunk, tokenizer, nn.ModuleList(), config.model)
    documents = setup.documents_for(plain, setup.read_tokens(config, tokenizer), config)
    return [(list(document.ids), list(document.supervised)) for document in documents]


def test_ranks_write_prompts_and_answers_together(tmp_path: Path) -> None:
    """Each its share, or with a sharded trunk all of it together: what is learned from is what one writes."""
    model_folder(tmp_path, "llama_gqa")
    alone = learned(settings(tmp_path, "alone"))
    assert alone and learned(settings(tmp_path, "alone")) == alone  # and nothing is written twice
    shards = ["none", "zero3"]
    assert in_ranks(2, learned_all, [settings(tmp_path, shard, shard) for shard in shards]) == [[alone, alone]] * 2
    assert all(len(written(tmp_path / shard / "own_prompts")) == 6 for shard in shards)


def test_functions_are_cut_after_their_docstrings() -> None:
    rows = packaged.stdlib_prompts(10_000, 0)
    texts = [row.text for row in rows]
    assert len(texts) == len(set(texts)) > 300
    for row in rows:
        assert len(row.text) <= packaged.LONGEST and row.unfinished and row.text.endswith(('"\n', "'\n"))
        (function,) = ast.parse(row.text).body
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        assert row.where.endswith(f".{function.name}") and ast.get_docstring(function) and len(function.body) == 1
    assert packaged.stdlib_prompts(5, 0) == rows[:5] != packaged.stdlib_prompts(5, 1)


def test_only_functions_that_go_on_are_prompts() -> None:
    source = '''
def no_words(): return 1

def nothing_more():
    """Words."""

def one(a,
        b=2):
    """Words
    and words."""
    return a

class C:
    def method(self):
        """Words."""
        return self

async def two():
    "Words."
    return 2
'''
    source += f'def long():\n    """{"w" * 900}"""\n    return 1\n'
    found = dict(packaged._beginnings(source))
    assert found == {
        "one": 'def one(a,\n        b=2):\n    """Words\n    and words."""\n',
        "two": 'async def two():\n    "Words."\n',
    }


@pytest.mark.parametrize("template", [True, False])
def test_functions_are_asked_for_in_a_chat_or_stand_for_themselves(tmp_path: Path, template: bool) -> None:
    data = {"stdlib_prompts": 4, "answers": "trunk", "max_len": 1000}
    tokenizer = tiny_tokenizer()
    if not template:
        tokenizer.chat_template = None
    tokens = setup.read_tokens(config(tmp_path, "tiny", data=data), tokenizer)
    texts = [row.text for row in packaged.stdlib_prompts(4, 0)]
    chats = [encode_prompt(tokenizer, [{"role": "user", "content": text}]) for text in texts]
    wanted = [tokenizer.decode(ids) for ids in chats] if template else texts
    assert [tokenizer.decode(ids) for ids in tokens.prompts] == wanted and not tokens.documents


def test_a_plan_reckons_with_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=tiny", "plan=true", f"run_dir={tmp_path}", "data.answers=trunk", "data.max_new_tokens=10"]
    run([*words, "data.stdlib_tokens=0", "data.own_prompts=50", "data.samples=2", "data.temperature=1"])
    out = capsys.readouterr().out
    assert f"about {50 * 2 * (2 + 96 + 10):,} tokens" in out and "50 own prompts are reckoned at 96 tokens each" in out
    run([*words, "data.stdlib_tokens=0", "data.stdlib_prompts=30"])
    rows = packaged.stdlib_prompts(30, 0)
    tokens = sum(len(prompt_ids(tiny_tokenizer(), row)) + 10 for row in rows)
    out = capsys.readouterr().out
    assert f"about {tokens:,} tokens" in out and "def " in out


def test_heads_learn_from_answers_or_from_all(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        json.dumps({"messages": [{"role": r, "content": "hi there"} for r in ("user", "assistant")]}) + "\n"
    )

    def marks(**data: Any) -> list[bool]:
        own = config(tmp_path, "tiny", data={"source": str(rows), **data})
        (document,) = setup.documents_for(untrained(), setup.read_tokens(own, tiny_tokenizer()), own)
        return [bool(mark) for mark in document.supervised]

    some, all_ = marks(), marks(learn_from="all")
    assert 0 < sum(some) < len(some) - 1 and all_ == [True] * (len(some) - 1) + [False]
