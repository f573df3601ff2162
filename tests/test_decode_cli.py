"""hispec-decode as it is typed: what it prints, what it writes, and what it refuses in one line."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from decode_fixtures import byte_tokenizer, random_heads, write_base
from torch import nn
from typed import Typed

from hispec import HiSpecModel
from hispec.config import check_exits, parse_assignments
from hispec.decode import cli
from hispec.decode.options import DecodeOptions
from hispec.decode.prompts import OutputFile, PromptRow, read_prompts
from hispec.decode.request import Completion, SamplingParams
from hispec.errors import DataError, FileError, HiSpecError
from hispec.recipes import read_recipe_file, recipe_names

ROOT = Path(__file__).parents[1]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def heads(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = HiSpecModel.from_base(str(base))
    model.tokenizer.chat_template = TEMPLATE
    model.heads = nn.ModuleList(random_heads(model.trunk, (2, 4), "mlp"))
    folder = tmp_path_factory.mktemp("heads") / "heads"
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    return Typed("hispec-decode", cli.main, monkeypatch, capsys)


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# One prompt.


def test_a_prompt_is_answered_as_plain_decoding_answers_it(typed: Typed, heads: Path, base: Path) -> None:
    words = ("prompt=Once upon", "max_new_tokens=20")
    text = typed(f"model={heads}", *words, "policy=fixed:2,4", "stats=true")
    assert "20 tokens, " in typed.err and "level 2 (exit 6)" in typed.err and "accepted" in typed.err
    for others in (
        [f"model={heads}", "exits=[]"],
        [f"model={heads}", "exits=[4]", "policy=fixed:5"],
        [f"model={base}", "exits=[]"],
        [f"model={base}", "exits=[]", "lookup=true"],
        [f"model={heads}", "lookup=true"],
        [f"model={base}", "heads=shared", "exits=[1,3,5]"],
    ):
        assert typed(*others, *words) == text
        assert typed.err == ""


def test_the_prompt_may_come_from_stdin(typed: Typed, heads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = typed(f"model={heads}", "prompt=Once upon", "max_new_tokens=8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon"))
    assert typed(f"model={heads}", "max_new_tokens=8") == expected


def test_a_conversation(typed: Typed, heads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nand on\n\n"))
    out = typed(f"model={heads}", "chat=true", "max_new_tokens=6", "system=be brief")
    assert out.count("> ") == 3 and "an empty line or Ctrl-D ends" in typed.err


def test_template_wraps_a_prompt(typed: Typed, heads: Path) -> None:
    wrapped = typed(f"model={heads}", "prompt=hi", "template=true", "max_new_tokens=8")
    assert wrapped == typed(f"model={heads}", "prompt=<user>hi", "max_new_tokens=8")


LAYERS = {"llama2-7b": 32, "llama2-13b": 40, "llama2-70b": 80, "llama3-8b": 32, "codellama-7b": 32, "codellama-34b": 48}


@pytest.mark.parametrize("model", LAYERS)
def test_a_recipe_for_each_model_of_the_paper(model: str) -> None:
    name = f"layerskip-{model}"
    options = cli._options([f"recipe={name}", "prompt=a=b", "exits=[1]", "temperature=0.5"])
    assert options.exits == [1] and options.prompt == "a=b" and options.temperature == 0.5, "what is typed wins"
    options = cli._options([f"recipe={name}"])
    assert options.model.lower() == f"facebook/{name}" and options.heads == "shared"
    assert len(check_exits(options.exits or [], LAYERS[model])) == 2
    cli._check(options)
    header = read_recipe_file(f"decode/{name}.yaml").split("\n\n")[0]
    purpose, _, needs, command = [line.removeprefix("# ") for line in header.splitlines()]
    assert "without trained heads" in purpose and needs.startswith("needs ") and f"recipe={name} " in command


def test_there_is_no_other_recipe() -> None:
    assert recipe_names("decode") == sorted(f"layerskip-{model}" for model in LAYERS)


def test_a_recipe_decodes_as_the_plain_model(typed: Typed, tmp_path: Path) -> None:
    words = [f"model={write_base(tmp_path, num_hidden_layers=12)}", "prompt=Once upon", "max_new_tokens=12"]
    text = typed("recipe=layerskip-llama3-8b", *words, "stats=true")
    assert "level 1 (exit 8)" in typed.err
    assert text == typed(*words, "exits=[]")


def test_help_is_there_without_torch() -> None:
    code = (
        "import sys; sys.argv = ['hispec-decode', '--help']; from hispec.decode.cli import main; main();"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for option in DecodeOptions.model_fields:
        assert f"\n  {option}" in done.stdout


# Refusals: one line, exit code 2.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["modle=x"], "unknown key 'modle'; did you mean 'model'?"),
        (["--draft-lenght", "4"], "'--draft-lenght' is not an option"),
        (["prompt=hi"], "model: a value is needed"),
        (["recipe=nonsense", "prompt=a"], "recipe 'nonsense' is unknown; there are: layerskip-codellama-34b, "),
        (["model=x", "prompt=a", "chat=true"], "prompt and chat exclude each other"),
        (["model=x", "prompt=a", "output=o"], "output=o goes with prompts=FILE"),
        (["model=x", "prompts=a"], "prompts=a needs output=FILE"),
        (["model=x", "heads=shared", "prompt=a"], "heads=shared needs the exits"),
        (["model=x", "prompt=a", "temperature=-1"], "temperature: input should be greater than or equal to 0 (got -1)"),
        (["model=x", "prompt=a", "max_new_tokens=many"], "max_new_tokens: input should be a valid integer"),
        (["model=x", "prompt=a", "exits=[1,"], "exits: '[1,' cannot be read"),
        (["model=x", "prompt=a", "dtype=int8"], "dtype: input should be 'auto', "),
        (["model=x", "prompt=a", "device=abacus"], "device: 'abacus' is not available here"),
        (["model=nowhere-at-all", "prompt=a"], "model 'nowhere-at-all': no such folder"),
        (["model=package:no_such_package", "prompt=a"], "package 'no_such_package' is not installed"),
    ],
)
def test_u01_wrong_words_are_refused_before_anything_is_loaded(typed: Typed, words: list[str], said: str) -> None:
    assert said in typed.refused(*words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["exits=[2,2]"], "exits: [2, 2]"),
        (["exits=[4,2]"], "exits: [4, 2]"),
        (["exits=[3]"], "exits: 3 has no head; this model has heads at [2, 4]"),
        (["policy=fixed:0,4"], "policy: "),
        (["policy=clever"], "policy: 'clever' is unknown"),
        (["policy=fixed:two"], "not whole numbers"),
        (["max_new_tokens=127"], "exceed the model's 128 positions"),
        ([f"prompt={'long ' * 60}"], "exceed the model's 128 positions"),
        (["prompt=a", "kv_blocks=1", "max_new_tokens=90"], "KV blocks, the pool has 1; raise kv_blocks"),
    ],
)
def test_m21_wrong_values_for_this_model_are_refused(typed: Typed, heads: Path, words: list[str], said: str) -> None:
    prompt = [] if words[0].startswith("prompt") else ["prompt=ab"]
    assert said in typed.refused(f"model={heads}", *prompt, *words)


def without_weights(model: Path, folder: Path) -> Path:
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize("exits", ["[0]", "[6]", "[7]", "[-1]", "[2,2]"])
def test_m21_wrong_exits_are_told_before_weights_load(
    typed: Typed, base: Path, heads: Path, tmp_path: Path, exits: str
) -> None:
    empty = without_weights(base, tmp_path)
    said = "legal exits of this model are 1..5"
    assert said in typed.refused(f"model={empty}", "heads=shared", f"exits={exits}", "prompt=a")
    assert said in typed.refused(f"model={heads}", f"base={empty}", f"exits={exits}", "prompt=a")
    assert "[2, 4]" in typed.refused(f"model={heads}", f"base={empty}", "exits=[3]", "prompt=a")
    assert "must rise" in typed.refused(f"model={heads}", f"base={empty}", "exits=[4,2]", "prompt=a")


def test_c11_a_wrong_base_and_damaged_heads(typed: Typed, heads: Path, base: Path, tmp_path: Path) -> None:
    other = write_base(tmp_path / "other", seed=1)
    assert "trained on another model: lm_head" in typed.refused(f"model={heads}", f"base={other}", "prompt=a")
    assert "does not describe hispec heads" in typed.refused(f"model={base}", "prompt=a")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in heads.iterdir():
        (damaged / path.name).write_bytes(path.read_bytes()[: 200 if path.suffix == ".safetensors" else None])
    assert "model.safetensors is damaged" in typed.refused(f"model={damaged}", "prompt=a")


def test_wrong_prompt_files(typed: Typed, tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        return typed.refused("model=x", f"prompts={path}", f"output={tmp_path / 'out.jsonl'}")

    assert "cannot read" in refused(tmp_path / "missing.jsonl")
    assert "has no lines" in refused(jsonl(tmp_path / "empty.jsonl"))
    assert "has no lines" in refused(jsonl(tmp_path / "blank.jsonl", "", "  "))
    good = {"prompt": "a"}
    for bad, said in [
        ('{"prompt": "a"', "not valid JSON"),
        ("[1]", "needs exactly one of prompt, messages, prompt_ids"),
        ({"prompt": "a", "prompt_ids": [1]}, "needs exactly one of"),
        ({"prompt": 3}, "prompt must be a str, is int"),
        ({"prompt": "a", "temperature": -1}, "temperature: "),
    ]:
        message = refused(jsonl(tmp_path / "bad.jsonl", good, "", bad, good))
        assert "bad.jsonl:3: " in message and said in message
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    assert "is not UTF-8" in refused(tmp_path / "latin.jsonl")
    assert not (tmp_path / "out.jsonl").exists() and not (tmp_path / "out.jsonl.part").exists()


def test_wrong_outputs(typed: Typed, tmp_path: Path) -> None:
    prompts = jsonl(tmp_path / "in.jsonl", {"prompt": "a"})
    (tmp_path / "there.jsonl").write_text("precious")
    assert "there.jsonl exists" in typed.refused("model=x", f"prompts={prompts}", f"output={tmp_path / 'there.jsonl'}")
    assert (tmp_path / "there.jsonl").read_text() == "precious"
    nowhere = tmp_path / "no" / "folder" / "out.jsonl"
    assert "cannot write" in typed.refused("model=x", f"prompts={prompts}", f"output={nowhere}")


# Files of prompts.

ROWS = [
    {"prompt": "Once", "id": "a", "max_new_tokens": 5},
    {"messages": [{"role": "user", "content": "hi"}], "max_new_tokens": 3},
    {"prompt_ids": [5, 9, 33], "max_new_tokens": 17, "note": [1, None]},
    {"prompt": "é世", "temperature": 0.9, "seed": 4, "max_new_tokens": 9},
    {"prompt": "stop", "max_new_tokens": 25},
]


def test_files_keep_their_order_and_g13_their_numbers_agree(typed: Typed, heads: Path, tmp_path: Path) -> None:
    prompts = jsonl(tmp_path / "in.jsonl", *ROWS[:2], "", *ROWS[2:])
    typed(f"model={heads}", f"prompts={prompts}", f"output={tmp_path / 'out.jsonl'}", "max_batch=3", "ignore_eos=true")
    lines = read(tmp_path / "out.jsonl")
    assert [line["index"] for line in lines] == [0, 1, 2, 3, 4]
    assert lines[0]["id"] == "a" and lines[2]["note"] == [1, None] and lines[2]["prompt_ids"] == [5, 9, 33]
    for row, line in zip(ROWS, lines, strict=True):
        ids = line["ids"]
        assert isinstance(ids, list) and line["completion_tokens"] == len(ids) == row["max_new_tokens"]
        assert line["text"] == byte_tokenizer().decode(ids, skip_special_tokens=True)
        assert line["finish_reason"] == "length"
    assert lines[2]["prompt_tokens"] == 3
    assert not list(tmp_path.glob("out.jsonl.*"))
    # Alone, plainly, and with another batch size: the same.
    typed(
        f"model={heads}",
        f"prompts={prompts}",
        f"output={tmp_path / 'plain.jsonl'}",
        "exits=[]",
        "max_batch=1",
        "ignore_eos=true",
    )
    assert (tmp_path / "plain.jsonl").read_bytes() == (tmp_path / "out.jsonl").read_bytes()


def test_a_killed_run_goes_on_where_it_was_and_ends_in_the_same_bytes(
    typed: Typed, heads: Path, tmp_path: Path
) -> None:
    prompts, out = jsonl(tmp_path / "in.jsonl", *ROWS), tmp_path / "out.jsonl"
    part = tmp_path / "out.jsonl.part"
    words = [f"model={heads}", f"prompts={prompts}", f"output={out}", "max_batch=2"]

    write = OutputFile.write

    def dying(self: OutputFile, number: int, completion: Completion) -> None:
        write(self, number, completion)
        if number == 2:
            raise HiSpecError("killed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OutputFile, "write", dying)
        typed.refused(*words)
    left = part.read_bytes()
    assert left.count(b"\n") >= 2 and not out.exists()
    part.write_bytes(left + b'{"index": 3, "te')  # the kill came in the middle of a line
    typed(*words)
    assert "of 5 lines are there already" in typed.err
    whole = out.read_bytes()
    assert not part.exists()
    typed(*words, "overwrite=true")
    assert out.read_bytes() == whole
    # Everything was written, only the name was missing: nothing is decoded again, no model is loaded.
    part.write_bytes(left.splitlines(keepends=True)[0] + whole)
    out.unlink()
    typed(*words)
    assert out.read_bytes() == whole
    part.write_bytes(left)
    out.unlink()
    assert "is from a run with other prompts or settings" in typed.refused(*words, "temperature=0.5")
    assert part.read_bytes() == left


def test_ctrl_c_leaves_finished_lines_and_says_130(heads: Path, tmp_path: Path) -> None:
    prompts = jsonl(tmp_path / "in.jsonl", *ROWS)
    code = (
        "import sys, hispec.decode.prompts as p; from hispec.decode.cli import main; write = p.OutputFile.write\n"
        "def stopping(self, number, completion):\n"
        "    write(self, number, completion)\n"
        "    raise KeyboardInterrupt\n"
        "p.OutputFile.write = stopping; main()"
    )
    words = [f"model={heads}", f"prompts={prompts}", f"output={tmp_path / 'out.jsonl'}", "max_batch=1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 130 and done.stderr.endswith("interrupted\n") and "Traceback" not in done.stderr
    assert len(read(tmp_path / "out.jsonl.part")) == 2


def test_threads_are_set(typed: Typed, heads: Path) -> None:
    before = torch.get_num_threads()
    typed(f"model={heads}", "prompt=a", "max_new_tokens=1", "threads=2")
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_errors_are_standard_types_too() -> None:
    assert issubclass(DataError, ValueError) and issubclass(FileError, OSError)


# Options that files and the command line carry.


def test_several_continuations_have_a_line_each_and_survive_a_kill(typed: Typed, heads: Path, tmp_path: Path) -> None:
    prompts = jsonl(tmp_path / "in.jsonl", {"prompt": "ab", "n": 3, "tag": 1}, {"prompt": "c", "logprobs": 1})
    words = [f"model={heads}", f"prompts={prompts}", "temperature=1.0", "seed=5", "max_new_tokens=6"]
    typed(*words, f"output={tmp_path / 'whole.jsonl'}")
    rows = read(tmp_path / "whole.jsonl")
    assert [(row["index"], row.get("choice")) for row in rows] == [(0, 0), (0, 1), (0, 2), (1, None)]
    assert len({str(row["ids"]) for row in rows[:3]}) == 3 and rows[0]["tag"] == 1
    assert len(rows[3]["logprobs"]) == len(rows[3]["ids"])  # type: ignore[arg-type]
    # A run that was killed between two continuations of one prompt.
    lines = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    part = tmp_path / "again.jsonl.part"
    output = OutputFile(
        tmp_path / "again.jsonl",
        DecodeOptions.build(parse_assignments([*words, f"output={tmp_path / 'again.jsonl'}"], DecodeOptions)),
        cli_rows(prompts),
        False,
    )
    output.close()
    part.write_text(part.read_text() + lines[1] + lines[3])
    typed(*words, f"output={tmp_path / 'again.jsonl'}")
    assert (tmp_path / "again.jsonl").read_text() == "".join(lines)


def cli_rows(prompts: Path) -> list[PromptRow]:
    return read_prompts(prompts, SamplingParams(temperature=1.0, seed=5, max_new_tokens=6).model_dump())


def test_a_failed_request_is_named_and_the_others_are_written(typed: Typed, base: Path, tmp_path: Path) -> None:
    model = HiSpecModel.from_base(str(base))
    embedding: torch.nn.Embedding = model.trunk.model.get_input_embeddings()
    with torch.no_grad():
        embedding.weight[byte_tokenizer()("z").input_ids] = float("nan")
    model.trunk.model.save_pretrained(tmp_path / "nan")
    byte_tokenizer().save_pretrained(tmp_path / "nan")
    prompts = jsonl(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "z"}, {"prompt": "b"})
    said = typed.refused(
        f"model={tmp_path / 'nan'}", "exits=[]", f"prompts={prompts}", f"output={tmp_path / 'out.jsonl'}",
        "max_new_tokens=4",
    )  # fmt: skip
    assert said == f"error: 1 of 3 requests failed; their lines in {tmp_path / 'out.jsonl'} say why in 'error'\n"
    rows = read(tmp_path / "out.jsonl")
    assert [row["finish_reason"] == "error" for row in rows] == [False, True, False]
    assert "logits after layer" in str(rows[1]["error"])
    assert "logits after layer" in typed.refused(
        f"model={tmp_path / 'nan'}", "exits=[]", "prompt=z", "max_new_tokens=4"
    )


def test_u02_lists_mappings_and_equals_signs_arrive_as_they_were_meant() -> None:
    got = DecodeOptions.build(
        parse_assignments(
            ["model=a b=c,1@x", "exits=[2, 4]", 'stop=["a=b", "c,d"]', "logit_bias={12: -100, 7: 1.5}",
             "prompt=x=[1]", "seed=null", "base=", "max_new_tokens=3"],
            DecodeOptions,
        )
    )  # fmt: skip
    assert (got.model, got.exits, got.stop, got.prompt) == ("a b=c,1@x", [2, 4], ["a=b", "c,d"], "x=[1]")
    assert got.logit_bias == {12: -100.0, 7: 1.5} and got.seed is None and got.base is None
    json_like = DecodeOptions.build(parse_assignments(["model=m", 'logit_bias={"12":-100}'], DecodeOptions))
    assert json_like.logit_bias == {12: -100.0}
