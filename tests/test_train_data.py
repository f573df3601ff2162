"""Rows, masks and packing: the cases of group D."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from train_fixtures import CHAT, CHAT_IDS, GENERATION, PLAIN, t1
from transformers import PreTrainedTokenizerFast

from hispec.errors import DataError
from hispec.train.data import Document, MicroBatch, batch_order, documents_of, frequent_tokens, pack
from hispec.train.masks import Message, encode_chat, encode_prompt, encode_text, supervised
from hispec.train.rows import Row, find_files, parse_row, read_file


def rows_file(folder: Path, *items: Any) -> Path:
    target = folder / "rows.jsonl"
    target.write_text("".join(json.dumps(item) + "\n" for item in items))
    return target


def read_files(path: Path | str) -> list[Row]:
    return [row for file in find_files(str(path)) for row in read_file(file)]


def spans(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> list[str]:
    """The decoded runs of answer tokens."""
    ids, answer = encode_chat(tokenizer, messages)
    runs: list[list[int]] = []
    for at, (token, mark) in enumerate(zip(ids, answer, strict=True)):
        if mark and (at == 0 or not answer[at - 1]):
            runs.append([])
        if mark:
            runs[-1].append(token)
    return [str(tokenizer.decode(run, skip_special_tokens=False)) for run in runs]


@pytest.mark.parametrize("template", [PLAIN, GENERATION])
def test_d01_one_bos(template: str) -> None:
    tokenizer = t1(template)
    ids, _ = encode_chat(tokenizer, CHAT)
    assert ids[:4] == encode_prompt(tokenizer, CHAT[:1])[:4] == [1, 4, 7, 8]
    assert encode_text(tokenizer, "hi there") == encode_text(tokenizer, "<s> hi there") == [1, 7, 8]


@pytest.mark.parametrize("template", [PLAIN, GENERATION])
def test_d03_answers_are_found_without_generation_markers(template: str) -> None:
    ids, answer = encode_chat(t1(template), CHAT)
    assert ids == CHAT_IDS
    assert [at for at, mark in enumerate(answer) if mark] == [6, 7, 8, 14, 15, 16]


def test_d03_a_template_that_hides_answers_is_refused() -> None:
    tokenizer = t1("{% for m in messages | reverse %}<|{{ m.role }}|> {{ m.content }} <|end|>{% endfor %}")
    with pytest.raises(DataError, match="chat template .* generation"):
        encode_chat(tokenizer, CHAT)
    with pytest.raises(DataError, match="no chat template"):
        encode_chat(t1(None), CHAT)


@pytest.mark.parametrize("metaspace", [False, True])
@pytest.mark.parametrize("turns", [1, 2, 4])
def test_d05_no_token_drifts(turns: int, metaspace: bool) -> None:
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    template += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    letters = (
        "\u2581 abcdefghijklmnopqrstuvwxyz0123456789\n.!🙂"
        if metaspace
        else sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    core = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.Metaspace() if metaspace else pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.Metaspace() if metaspace else decoders.ByteLevel()
    marks = ["<|user|>", "<|assistant|>", "<|end|>"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, additional_special_tokens=marks)  # type: ignore[no-untyped-call]
    tokenizer.chat_template = template
    for start in ("a", "7", "\n", "🙂"):
        answers = [f"{start}nswer {number}." for number in range(turns)]
        chat = [
            turn
            for text in answers
            for turn in ({"role": "user", "content": "hi"}, {"role": "assistant", "content": text})
        ]
        assert [span.replace(" ", "") for span in spans(tokenizer, chat)] == [
            f"{text}<|end|>".replace(" ", "") for text in answers
        ]


def test_d06_the_last_prompt_token_is_trained_and_the_end_marker_is_not() -> None:
    ids, answer = encode_chat(t1(), CHAT[:2])
    batch = MicroBatch((Document(ids, supervised(answer)),))
    assert batch.rows_S.tolist() == [5, 6, 7]
    assert batch.targets_S.tolist() == [9, 10, 6]


def test_d08_rows_without_supervised_tokens_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    long = Row("long", ({"role": "user", "content": "hi " * 40}, {"role": "assistant", "content": "ok"}))
    short = Row("short", tuple(CHAT))
    with caplog.at_level(logging.WARNING, logger="hispec"):
        documents, skipped = documents_of([long, short] * 4, t1(), max_len=24)
    assert len(documents) == 4 and sum(skipped.values()) == 4
    assert "4 rows skipped" in caplog.text
    with pytest.raises(DataError, match="max_len"):
        documents_of([long] * 8, t1(), max_len=24)
    with pytest.raises(DataError, match="long: .*max_len=24"):
        documents_of([short, long], t1(), max_len=24, strict=True)


def test_d09_a_cut_answer_keeps_its_half() -> None:
    chat = Row("", ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "A B C D A B C D A B"}))
    ids, answer = encode_chat(t1(), chat.messages)
    cut = answer.index(True) + 4
    (document,), _ = documents_of([chat], t1(), max_len=cut)
    assert document.ids == ids[:cut] and sum(document.supervised) == 4


def test_d10_sharegpt_keeps_all_turns_and_the_system_text(tmp_path: Path) -> None:
    turns = [("human", "hi"), ("gpt", "ok"), ("human", "B"), ("gpt", "yes")]
    row = {"id": "r1", "system": "A", "conversations": [{"from": role, "value": text} for role, text in turns]}
    (read,) = read_files(rows_file(tmp_path, row))
    assert [message["role"] for message in read.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert spans(t1(), list(read.messages)) == ["ok <|end|>", "yes <|end|>"]


def test_d12_conventions_may_be_mixed() -> None:
    role_content = CHAT[:2]
    from_value = [{"from": "human", "value": "hi there"}, {"from": "gpt", "value": "ok yes"}]
    mixed = [role_content[0], from_value[1]]
    wanted = tuple(role_content)
    rows = [
        {"messages": role_content},
        {"conversations": from_value},
        {"conversations": role_content},
        {"messages": mixed},
    ]
    assert all(parse_row(row, "").messages == wanted for row in rows)


def test_d13_a_template_that_refuses_rows_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}{% if not loop.first and m.role == loop.previtem.role %}"
        "{{ raise_exception('turns must alternate') }}{% endif %}{% endfor %}"
    ) + PLAIN
    odd = {3: ({"role": "system", "content": "A"}, *CHAT), 7: (CHAT[0], *CHAT)}
    rows = [Row(f"row {n}", odd.get(n, tuple(CHAT))) for n in range(10)]
    with caplog.at_level(logging.WARNING, logger="hispec"):
        documents, skipped = documents_of(rows, t1(template), max_len=64)
    assert len(documents) == 8 and sum(skipped.values()) == 2
    assert "no system) (the first: row 3)" in caplog.text and "alternate) (the first: row 7)" in caplog.text
    with pytest.raises(DataError, match=r"row 3: refused by the chat template \(no system\)"):
        documents_of(rows, t1(template), max_len=64, strict=True)


def test_d16_nulls_parts_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, {"role": "assistant", "content": "ok"}]
    plain = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]
    empty = [{"role": "user", "content": None}, {"role": "assistant", "content": "ok"}]
    rows = [{"meta": None, "messages": plain}, {"meta": "x", "messages": parts}, {"messages": empty}]
    path = tmp_path / "bom.jsonl"
    path.write_text(
        "\ufeff" + "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8"
    )
    first, second, third = read_files(path)
    assert first.messages == second.messages
    assert third.messages[0]["content"] == ""


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "hi"}\n{"text": \n', r"a\.jsonl:2: not valid JSON"),
        ("a.jsonl", "", "holds no rows"),
        ("a.json", '{"text": "hi"}', "must hold a list"),
        ("a.csv", "hi", "files of type '.csv'"),
        ("a.parquet", "hi", "a.parquet: not valid Parquet"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        read_files(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ([1], "a row is a JSON object"),
        ({"body": "hi"}, "a row needs messages.*body"),
        ({"messages": [{"role": "boss", "content": "hi"}]}, "role 'boss' is unknown"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "loss_mask must be as long as input_ids, which has 2"),
        ({"input_ids": ["a"]}, "must be a list of token ids"),
        ({"input_ids": [1, 999], "labels": [1, 999]}, r"not in the vocabulary, 0\.\.14"),
    ],
)
def test_bad_rows_are_counted_or_with_strict_named(tmp_path: Path, item: Any, message: str) -> None:
    rows = read_files(rows_file(tmp_path, {"text": "hi there"}, item))
    documents, skipped = documents_of(rows, t1(), max_len=24)
    assert len(documents) == 1 and sum(skipped.values()) == 1
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: .*{message}.*data\.strict=false") as caught:
        documents_of(rows, t1(), max_len=24, strict=True)
    assert "\n" not in str(caught.value)


def test_token_ids_come_with_a_mask_of_answers() -> None:
    """Masks and labels mark the tokens to be said; trained is the position before each (D06)."""
    ids = CHAT_IDS[:9]
    mask = {"input_ids": ids, "loss_mask": [0, 0, 0, 0, 0, 0, 1, 1, 1]}
    labels = {"input_ids": ids, "labels": [-100] * 6 + ids[6:]}
    chat = {"messages": CHAT[:2]}
    first, second, third = documents_of([parse_row(row, "") for row in (mask, labels, chat)], t1(), 64)[0]
    assert first == second == third
    (bare,), _ = documents_of([parse_row({"input_ids": ids}, "")], t1(), 64)
    assert list(bare.supervised) == [True] * 8 + [False]


def test_prompt_and_completion_are_a_chat() -> None:
    wanted = parse_row({"messages": CHAT[:2]}, "")
    assert parse_row({"prompt": "hi there", "completion": "ok yes"}, "") == wanted
    assert parse_row({"prompt": CHAT[:1], "completion": CHAT[1:2]}, "") == wanted
    assert parse_row({"prompt": "hi there"}, "").messages == wanted.messages[:1]


def test_text_is_cut_into_documents_and_trained_everywhere(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A B C D " * 5)
    documents, _ = documents_of(read_files(tmp_path / "*.txt"), t1(), max_len=8)
    assert [len(document.ids) for document in documents] == [8, 8, 5]
    assert all(all(document.supervised) for document in documents)
    batch = MicroBatch(tuple(documents))
    assert batch.targets_S[7] == batch.targets_S[-1] == -1  # no document's end predicts the next one's start
    assert batch.positions_T.tolist() == [*range(8), *range(8), *range(5)]


def test_packing_keeps_every_document_once_and_fills_batches() -> None:
    documents = [Document([number] * (1 + 7 * number % 30), [True] * (1 + 7 * number % 30)) for number in range(60)]
    batches = pack(documents, tokens=64, seed=0)
    assert sorted(d.ids[0] for batch in batches for d in batch.documents) == list(range(60))
    assert all(sum(batch.lengths) <= 64 for batch in batches)
    assert sum(sum(batch.lengths) for batch in batches) > 0.85 * 64 * len(batches)


def test_d19_every_epoch_has_another_order_and_every_run_the_same() -> None:
    order, again = batch_order(8, seed=1), batch_order(8, seed=1)
    first, second = [order(place) for place in range(8)], [order(place) for place in range(8, 16)]
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second
    assert [again(place) for place in range(5, 16)] == (first + second)[5:]  # a resumed run needs no history


def test_reduced_vocabulary_is_the_most_frequent_targets() -> None:
    documents = [Document([9, 7, 7, 8, 5], [True, True, True, False, False])]
    assert frequent_tokens(documents, 2, 20).tolist() == [7, 8]
    assert frequent_tokens(documents, 4, 20).tolist() == [0, 1, 7, 8]
    assert frequent_tokens(documents, 3, 20).dtype == torch.int64
    with pytest.raises(DataError, match="does not reduce"):
        frequent_tokens(documents, 20, 20)
