"""What a user types: help, recipes, overrides, and ten ways to be wrong."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from train_fixtures import model_folder

from hispec.decode import overlap
from hispec.decode.prompt_sets import packaged_texts
from hispec.errors import ConfigError, HiSpecError
from hispec.model import HiSpecModel
from hispec.recipes import read_recipe_file
from hispec.train.cli import load, run
from hispec.train.config import TrainConfig
from hispec.train.data import Document
from hispec.train.preview import show
from hispec.train.tiny import tiny_tokenizer


def fails(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a wrong command gives."""
    with pytest.raises(HiSpecError) as caught:
        run(list(words))
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_help_is_fast_and_light() -> None:
    code = "import sys; from hispec.train.cli import run; run(['--help']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "recipe=NAME" in done.stdout and "train.loss.kl" in done.stdout


def test_errors_are_one_line_and_exit_2() -> None:
    words = [sys.executable, "-m", "hispec.train.cli", "recipe=tiny", "train.lrr=1"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: unknown key 'train.lrr'; did you mean 'train.lr'?\n"


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    run(["recipes"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("tiny ") and "random model" in line for line in lines)
    assert any(line.startswith("smollm2-135m ") for line in lines)


def test_every_packaged_recipe_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    run(["recipes"])
    for line in capsys.readouterr().out.splitlines():
        name = line.split()[0]
        assert load([f"recipe={name}"]).run_dir == f"runs/{name}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recipe=tiny", "train.lerning_rate=1"], "unknown key 'train.lerning_rate'"),
        (["recipe=tinny"], "unknown recipe 'tinny'; did you mean 'tiny'?"),
        (["train.lr=1"], "give one recipe=NAME; there are: "),
        (["recipe=tiny", "train.lr"], "'train.lr' is not a setting"),
        (["recipe=tiny", "--lr", "1"], "unknown option '--lr'"),
        (["recipe=tiny", "train.lr=fast"], "train.lr: "),
        (["recipe=tiny", "train.lr=-1"], "train.lr: "),
        (["recipe=tiny", "train.zero=4"], "train.zero: "),
        (["recipe=tiny", "train.loss.kl=0"], "nothing to learn"),
        (["recipe=tiny", "exits=[0]"], "exits: 0 is out of range; legal exits of this model are 1..5"),
        (["recipe=tiny", "exits=[6]"], "exits: 6 is out of range"),
        (["recipe=tiny", "exits=[2,2]"], "names an exit twice"),
        (["recipe=tiny", "exits=[4,2]"], "must rise"),
        (["recipe=tiny", "heads=[{kind: norm}]"], "heads: 1 given for 2 exits"),
        (["recipe=tiny", "data.source=[nothing.jsonl]"], "'nothing.jsonl' matches no file"),
        (["recipe=tiny", "data.prompts=everyday"], "answers=trunk"),
        (["recipe=tiny", "data.own_prompts=9"], "answers=trunk"),
        (["recipe=tiny", "data.stdlib_prompts=9"], "answers=trunk"),
        (["recipe=tiny", "data.samples=2"], "temperature"),
        (["recipe=tiny", "data.stdlib_tokens=0"], "no source of text"),
        (["recipe=tiny", "model=no_such_folder"], "no such folder"),
        (["recipe=tiny", "eval.prompts=weekend"], "neither a packaged list (everyday) nor a file"),
        (["recipe=tiny", "eval.policy=auto"], "eval.policy: 'auto' cannot be simulated; give a fixed policy"),
        (["recipe=tiny", "eval.policy=fixed:x"], "policy: 'fixed:x' has windows that are not whole numbers"),
        (["recipe=tiny", "data.learn_from=prompts"], "data.learn_from: "),
        (["recipe=tiny", "chat_template=nothing.jinja"], "chat_template 'nothing.jinja' cannot be read"),
        (["recipe=tiny", "head.vocab_size=5000"], "does not reduce a vocabulary"),
        (["--config-dir", "nowhere", "recipe=tiny"], "is not a folder"),
    ],
)
def test_mistakes_are_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert message in fails(capsys, *words, f"run_dir={tmp_path / 'run'}")


def test_bad_rows_are_told_with_their_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one"}\n{"text": \n')
    words = ["recipe=tiny", f"data.source=[{path}]", f"run_dir={tmp_path / 'run'}"]
    assert "rows.jsonl:2: not valid JSON" in fails(capsys, *words)
    path.write_text("")
    assert "rows.jsonl holds no rows" in fails(capsys, *words)


def test_an_unwritable_run_folder_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot write" in fails(capsys, "recipe=tiny", f"run_dir={tmp_path / 'file' / 'run'}")


def test_m21_exits_are_checked_before_weights_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = model_folder(tmp_path, "llama_gqa")
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    words = ["recipe=tiny", f"model={folder}", "exits=[7]", f"run_dir={tmp_path / 'run'}"]
    assert "7 is out of range; legal exits of this model are 1..5" in fails(capsys, *words)


@pytest.mark.slow
def test_t15_t18_no_gpu_no_compiler_no_tracker(tmp_path: Path) -> None:
    """With nothing on the PATH, no CUDA and no wandb, the whole way works; and decoding never loads DeepSpeed."""
    (tmp_path / "wandb.py").write_text("raise ImportError('not installed')\n")
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    words = ["recipe=tiny", "train.max_steps=2", "eval.max_prompts=1", "eval.max_new_tokens=4", f"run_dir={tmp_path}"]

    def result(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)

    done = result("-m", "hispec.train.cli", *words)
    assert done.returncode == 0 and "heads exported" in done.stderr, done.stderr
    done = result("-m", "hispec.train.cli", *words, "wandb.mode=offline")
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("error: wandb.mode: wandb is not installed")
    code = "import sys; from hispec.decode.cli import main; main(); assert 'deepspeed' not in sys.modules"
    done = result("-c", code, f"model={tmp_path / 'heads'}", "prompt=a", "max_new_tokens=2")
    assert done.returncode == 0, done.stderr


def test_t16_the_launchers_flag_is_taken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    run(["--local_rank=0", "recipes"])
    assert "tiny" in capsys.readouterr().out


def test_overrides_recipes_of_ones_own_and_what_they_build_on(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("# Mine.\ndefaults: [tiny, _self_]\ntrain:\n  lr: 0.5\n")
    words, folder = ["recipe=mine", "exits=[2,3]", "data.temperature=0.5", "wandb.mode=offline"], tmp_path
    settings = load(words, folder)
    assert (settings.train.lr, settings.exits, settings.data.temperature) == (0.5, [2, 3], 0.5)
    assert settings.model == "tiny" and settings.run_dir == "runs/mine"
    with pytest.raises(ConfigError, match="cannot be read"):
        load(["recipe=tiny", "exits=[1"])


SIZES = {  # millions of parameters, as the models' cards have them, and devices
    "llama2-7b": (6_738, 8), "llama2-13b": (13_016, 8), "llama2-70b": (68_977, 8), "llama3-8b": (8_030, 8),
    "llama3-70b": (70_554, 8), "codellama-7b": (6_739, 8), "codellama-34b": (33_744, 8), "qwen3-0.6b": (596, 1),
    "qwen3-4b": (4_022, 8), "qwen3-8b": (8_191, 8), "opt-1.3b": (1_316, 1), "opt-6.7b": (6_658, 8),
}  # fmt: skip


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers at the Hub's address, and the test takes no longer for it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("name", SIZES)
def test_every_recipe_is_planned_from_shapes_alone(name: str, no_hub: None, capsys: pytest.CaptureFixture[str]) -> None:
    header = read_recipe_file(f"{name}.yaml").split("\n\n")[0]
    assert all(
        word in header for word in ("# needs ", f"hispec-train recipe={name}", "# data ", "# cost ", "not measured")
    )
    run([f"recipe={name}", "plan=true"])
    out = capsys.readouterr().out
    (model,) = re.findall(r"([\d,.]+) M parameters", out)
    assert round(float(model.replace(",", ""))) == pytest.approx(SIZES[name][0], abs=1)
    assert f"{SIZES[name][1]} x GPU" in out and "TOO MUCH" not in out and "not measured" in out
    needed, given = re.findall(r"about ([\d.]+) of (\d+) GB on each rank", out)[0]
    parts = [float(part) for part in re.findall(r"^ +([\d.]+) GB  ", out, re.MULTILINE)]
    assert sum(parts) == pytest.approx(float(needed), abs=0.05) and float(needed) < float(given)


def test_the_70b_plan_says_what_each_gpu_holds(no_hub: None, capsys: pytest.CaptureFixture[str]) -> None:
    run(["recipe=llama2-70b", "plan=true"])
    out = capsys.readouterr().out
    for part in (
        "1/8 of the trunk's layers",
        "embedding and unembedding, whole",
        "the layer that runs",
        "ZeRO stage 2",
    ):
        assert re.search(rf"[\d.]+ GB  .*{part}", out), part
    run(["recipe=llama2-70b", "plan=true", "trunk.shard=none"])
    assert "TOO MUCH" in capsys.readouterr().out


def test_a_plan_shows_rows_and_what_is_learned_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats = tmp_path / "chats.jsonl"
    rows = [{"prompt": f"hi {n}", "completion": "ok\nyes"} for n in range(5)]
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["recipe=tiny", "plan=true", f"run_dir={tmp_path / 'run'}", f"data.source={chats}", "data.stdlib_tokens=0"]
    run(words)
    out = capsys.readouterr().out
    shown = [line.strip() for line in out.splitlines() if "<|user|>" in line]
    assert shown == [f"<s><|user|>hi {n}<|end|><|assistant|>[[ok\\nyes<|end|>]]" for n in range(3)]
    assert f"about {5 * 15} tokens an epoch" in out  # a byte is a token
    run([*words, "data.answers=trunk", "data.max_new_tokens=10"])
    out = capsys.readouterr().out
    assert f"about {5 * (8 + 10)} tokens" in out and "still to be written" in out
    document = Document([3, 4, 5], [True, False, False])
    assert show(document, tiny_tokenizer(), colour=True).count("\033[32m") == 1


def test_the_whole_configuration_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    run(["recipe=llama2-7b", "--cfg", "job", "train.lr=0.1"])
    shown = yaml.safe_load(capsys.readouterr().out)
    assert TrainConfig.build(shown) == load(["recipe=llama2-7b", "train.lr=0.1"])
    assert "--cfg 'all' is not known" in fails(capsys, "recipe=tiny", "--cfg=all")


def test_plan_prints_and_trains_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["recipe=tiny", "plan=true", f"run_dir={tmp_path / 'run'}"])
    out = capsys.readouterr().out
    for word in ("model", "device", "exit 1", "steps", "memory", "trainable", "export"):
        assert word in out
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"tiny"}


def test_the_tiny_recipe_runs_and_its_answers_too(tmp_path: Path) -> None:
    """The whole way: prompts, answers by the trunk, text, training, evaluation, export."""
    words = ["recipe=tiny", f"run_dir={tmp_path / 'run'}", "train.max_steps=3", "data.stdlib_tokens=500"]
    words += ["data.prompts=everyday", "data.max_prompts=5", "data.answers=trunk", "data.max_new_tokens=10"]
    run([*words, "data.own_prompts=8"])
    exported = HiSpecModel.from_pretrained(tmp_path / "run" / "heads")
    assert exported.exits == (1, 3)
    assert len((tmp_path / "run" / "own_prompts" / "00000.jsonl").read_text().splitlines()) == 9
    answers = (tmp_path / "run" / "answers" / "00000.jsonl").read_text().splitlines()
    assert 6 < len(answers) <= 14  # how it was written, five answers, and those to the prompts that could be used
    held_out, training = packaged_texts("everyday")
    trained = [text for text in training if text in answers[1] + answers[2]]
    assert len(trained) == 2
    found = overlap.find([str(tmp_path / "run" / "answers")], {"held_out": held_out, "trained": trained})
    assert found == {"held_out": [], "trained": trained}
    config = json.loads((tmp_path / "run" / "heads" / "config.json").read_text())
    assert config["training"]["data"]["own_prompts"] == 8 and len(config["metrics"]["exits"]) == 2
