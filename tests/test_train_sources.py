"""Where rows come from, and that they are encoded once, by all ranks together."""

import importlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from train_fixtures import CHAT, GENERATION, PLAIN, model_folder, prompts_file, t1

from hispec.errors import DataError, FileError
from hispec.train import sources
from hispec.train.data_config import DataConfig, SourceConfig
from hispec.train.tokens import TokenCache, key


def rows_file(folder: Path, n_rows: int = 40, name: str = "rows.jsonl") -> Path:
    """Texts of which each says a number of its own."""
    folder.mkdir(exist_ok=True)
    target = folder / name
    target.write_text("".join(json.dumps({"text": f"hi w{15 + n} A B"}) + "\n" for n in range(n_rows)))
    return target


def texts(*given: Any, seed: int = 0) -> list[str]:
    config = DataConfig.build({"source": list(given)})
    return [row.text for row in sources.rows_of(config.source, seed)]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` keeps what it converts; here, not in the user's home."""
    datasets: Any = importlib.import_module("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub_cache"))
    datasets.disable_progress_bars()


def test_files_globs_and_folders_in_every_format(tmp_path: Path) -> None:
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    folder = tmp_path / "all"
    rows_file(folder, 3, "a.jsonl")
    (folder / "b.json").write_text(json.dumps([{"text": "B"}]))
    parquet.write_table(arrow.Table.from_pylist([{"text": "C"}, {"text": "D"}]), folder / "c.parquet")
    (folder / "d.txt").write_text("ok yes")
    (folder / "readme.pdf").write_text("not read")
    wanted = ["hi w15 A B", "hi w16 A B", "hi w17 A B", "B", "C", "D", "ok yes"]
    assert texts(str(folder)) == wanted
    assert texts(str(folder / "[ab].json*")) == wanted[:4]
    assert texts(*(str(folder / name) for name in ("c.parquet", "b.json"))) == ["C", "D", "B"]


def test_several_sources_with_weights(tmp_path: Path) -> None:
    first, second = rows_file(tmp_path, 40, "a.jsonl"), rows_file(tmp_path, 10, "b.jsonl")
    mixed = [{"path": str(first), "weight": 0.5}, {"path": str(second), "weight": 2.0, "rows": 3}]
    found = texts(*mixed)
    assert found[-6:] == [f"hi w{15 + n // 2} A B" for n in range(6)]
    half = found[:-6]
    assert 10 < len(half) < 30 and len(set(half)) == len(half)
    assert texts(*mixed) == found != texts(*mixed, seed=1)


@pytest.mark.parametrize("streaming", [False, True])
def test_data_sets_through_datasets(tmp_path: Path, own_cache: None, streaming: bool) -> None:
    """As `datasets` reads a repository of the Hub; this one lies in a folder."""
    folder = tmp_path / "org"
    folder.mkdir()
    for split in ("train_sft", "test_sft"):
        (folder / f"{split}.jsonl").write_text(json.dumps({"messages": CHAT, "prompt_id": split}) + "\n")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        "  - {split: train_sft, path: train_sft.jsonl}\n  - {split: test_sft, path: test_sft.jsonl}\n---\n"
    )
    source = SourceConfig(path=str(folder), split="train_sft", streaming=streaming)
    (row,) = sources.dataset_rows(source)
    assert [message["content"] for message in row.messages] == [message["content"] for message in CHAT]
    assert row.where.endswith("(train_sft), row 1")
    with pytest.raises(FileError, match="cannot be read: .*nothing") as caught:
        list(sources.dataset_rows(source.model_copy(update={"split": "nothing"})))
    assert "\n" not in str(caught.value)


def test_what_is_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows_file(tmp_path / "org", name="set")
    assert sources.is_hub("HuggingFaceH4/ultrachat_200k")
    assert not any(map(sources.is_hub, ("org/set", "chats/train.jsonl", "./org/set2", "chats", "org/*", "/data/chats")))
    with pytest.raises(FileError, match="'chats/train.jsonl' matches no file"):
        texts("chats/train.jsonl")


def cache(folder: Path, source: Path, template: str | None = PLAIN, **changes: Any) -> TokenCache:
    tokenizer = t1(template, changes.pop("size", 60))
    config = DataConfig.build({"source": str(source), "max_len": 64, **changes})
    return TokenCache(folder, config, tokenizer, 0)


def first(cached: TokenCache) -> tuple[list[int], list[bool]]:
    cached.write(sources.rows_of(cached.config.source, 0), 0, 1)
    document = cached.read().documents[0]
    return list(map(int, document.ids)), list(map(bool, document.supervised))


def test_d15_no_change_meets_old_tokens(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"messages": [*CHAT[:2], *CHAT[2:]]}) + "\n")
    shorter = PLAIN.replace("{{ bos_token }}", "")
    changes: list[dict[str, Any]] = [
        {}, {"template": shorter}, {"template": GENERATION}, {"max_len": 9}, {"size": 61}, {"answers": "trunk"}
    ]  # fmt: skip
    caches = [cache(tmp_path / "tokens", chats, **change) for change in changes]
    assert len({entry.folder for entry in caches}) == len(changes)
    found = [first(entry) for entry in caches[:5]]
    assert found[1] != found[0] and found[3] == (found[0][0][:9], found[0][1][:9])
    assert found[2] == found[0]  # another template, which says the same
    # The file itself may change, under its old name.
    before = key(caches[0].config, caches[0].tokenizer, 0)
    chats.write_text(json.dumps({"messages": CHAT[:2]}) + "\n")
    os.utime(chats, ns=(1, 1))
    assert key(caches[0].config, caches[0].tokenizer, 0) != before


def test_tokens_are_read_again_not_made_again(tmp_path: Path) -> None:
    cached = cache(tmp_path / "tokens", rows_file(tmp_path))
    again = first(cached)
    cached.write(iter(()), 0, 1)  # nothing is asked of the rows
    assert first(cached) == again and len(cached.read().documents) == 40


@pytest.mark.parametrize("world", [1, 2, 3])
def test_d17_ranks_share_the_rows_each_once(tmp_path: Path, own_cache: None, world: int) -> None:
    """Streamed rows, too: the union is complete, nothing comes twice, and the order is that of one rank."""
    folder = tmp_path / "set"
    rows_file(folder)
    cached = cache(tmp_path / "tokens", folder)
    for rank in range(world):
        rows = sources.dataset_rows(SourceConfig(path=str(folder), streaming=True))
        if rank:
            with pytest.raises(FileError, match="lacks parts"):
                cached.read()
        cached.write(rows, rank, world)
    numbers = [int(document.ids[2]) for document in cached.read().documents]
    assert numbers == list(range(15, 55))


def test_a_share_that_was_cut_off_is_made_again(tmp_path: Path) -> None:
    cached = cache(tmp_path / "tokens", rows_file(tmp_path))
    cached.write(sources.rows_of(cached.config.source, 0), 1, 4)  # one of four ranks had finished
    first(cached)
    assert len(cached.read().documents) == 40


@pytest.mark.slow
def test_d08_every_row_too_long_stops_before_step_1_on_two_ranks(tmp_path: Path) -> None:
    long = [{"prompt": "hi " * 40, "completion": "ok"}] * 4
    short = [{"prompt": "hi there", "completion": "ok yes"}] * 4
    bad, mixed = tmp_path / "bad.jsonl", tmp_path / "mixed.jsonl"
    bad.write_text("".join(json.dumps(row) + "\n" for row in long))
    mixed.write_text("".join(json.dumps(row) + "\n" for row in long + short))
    done = two_ranks(tmp_path, bad)
    assert done.returncode != 0 and "no row can be trained on: 4 x no supervised token" in done.stderr
    assert "max_len" in done.stderr and not (tmp_path / "run" / "metrics.jsonl").exists()
    done = two_ranks(tmp_path, mixed)
    assert done.returncode == 0, done.stderr
    assert "4 rows skipped" in done.stderr
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < step["loss"] < 1e3 for step in steps if "loss" in step)


def two_ranks(folder: Path, rows: Path) -> subprocess.CompletedProcess[str]:
    model = folder / "llama_gqa" if (folder / "llama_gqa").is_dir() else model_folder(folder, "llama_gqa")
    prompts = prompts_file(folder)
    words = [
        "recipe=tiny",
        f"model={model}",
        f"run_dir={folder / 'run'}",
        f"data.source={rows}",
        f"eval.prompts={prompts}",
    ]
    small = ["data.stdlib_tokens=0", "data.max_len=24", "train.micro_batch_tokens=24", "train.max_steps=2"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29713"]
    return subprocess.run(
        [*launch, "-m", "hispec.train.cli", *words, *small], capture_output=True, text=True, timeout=120
    )


def test_d03_skipped_rows_are_told_again_from_the_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "hi there"}\n{"body": "hi"}\n')
    cached = cache(tmp_path / "tokens", rows)
    first(cached)
    with caplog.at_level(logging.WARNING, logger="hispec"):
        cached.read()
    assert "1 rows skipped: a row needs messages" in caplog.text and "rows.jsonl:2" in caplog.text
    with pytest.raises(DataError, match=r"rows\.jsonl:2"):
        strict = cache(tmp_path / "tokens", rows, strict=True)
        strict.write(sources.rows_of(strict.config.source, 0), 0, 1)
