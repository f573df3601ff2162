"""Two processes that share the layers of a model decode what one process decodes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_fixtures import PROMPTS, assert_close, byte_tokenizer, random_heads, write_base
from family_models import FAMILIES
from tiny_models import make
from torch import nn

from hispec import HiSpecModel
from hispec.base import load_base
from hispec.decode.cli import main as cli_main
from hispec.errors import ConfigError, UnsupportedModelError
from hispec.families import check_shards

ROOT = Path(__file__).parents[1]
# One of each way to shard: tied, biases, q/k norms, experts, soft-caps, fused and gathered qkv, parallel blocks.
SHARDED = ["llama_tied", "qwen2", "qwen3_moe", "gemma2", "phi3", "gpt_neox", "cohere2"]
ROWS: list[dict[str, Any]] = [
    {"prompt_ids": PROMPTS[3]},
    {"prompt": "Once upon a time", "max_new_tokens": 24},
    {"prompt": "Once", "temperature": 1.0, "seed": 3},
    {"prompt": "Twice", "temperature": 0.7, "top_p": 0.9, "seed": 4},
    {"prompt": "Once", "temperature": 1.0, "seed": 3, "rule": "rejection"},
    {"prompt": "Unseeded", "temperature": 1.0},
]
# What each rank does; the words after the script's name are a folder.
SCRIPT = """
import json, sys
from pathlib import Path
import torch
from hispec import HiSpecModel, ranks
from hispec.decode.cli import main
from hispec.ranks import fresh_seed

folder = Path(sys.argv[1])
ranks.join()
(folder / f"seeds{torch.distributed.get_rank()}").write_text(json.dumps([fresh_seed(), fresh_seed()]))
for words in json.loads((folder / "calls.json").read_text()):
    sys.argv = ["hispec-decode", *words]
    main()
for path in sorted((folder / "families").iterdir()):
    trunk = HiSpecModel.from_base(path, (2, 4), n_ranks=2).trunk
    assert sum(type(p).__name__ == "DTensor" for p in trunk.model.parameters()) > 6
    torch.save(trunk.logits(torch.load(folder / "ids.pt")), path / f"logits{torch.distributed.get_rank()}.pt")
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what two ranks have made of models, heads and prompts."""
    folder = tmp_path_factory.mktemp("ranks")
    model = HiSpecModel.from_base(write_base(folder / "base"))
    [first], [_, second] = (
        random_heads(model.trunk, (2,), "mlp"),
        random_heads(model.trunk, (2, 4), "block", torch.arange(0, 258, 2)),
    )
    model.heads = nn.ModuleList([first, second])
    model.save_pretrained(folder / "heads")
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name in SHARDED:
        make(FAMILIES[name]).save_pretrained(folder / "families" / name)
        byte_tokenizer().save_pretrained(folder / "families" / name)
    torch.save(torch.tensor(PROMPTS[3]), folder / "ids.pt")
    (folder / "calls.json").write_text(json.dumps([*(call(folder, kind, "two") for kind in CALLS), said(folder)]))
    (folder / "script.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    # Ranks that disagree wait for each other for ever.
    done = subprocess.run(
        [*torchrun, folder / "script.py", folder], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    (folder / "stdout").write_text(done.stdout)
    (folder / "stderr").write_text(done.stderr)
    return folder


CALLS = {
    "heads": ["model={0}/heads", "policy=fixed:3,4"],
    "shared": ["model={0}/base", "heads=shared", "exits=[1,3]", "policy=fixed:2,4"],
    "plain": ["model={0}/base", "exits=[]"],
}


def call(folder: Path, kind: str, who: str) -> list[str]:
    words = [*CALLS[kind], "prompts={0}/in.jsonl", f"output={{0}}/{kind}-{who}.jsonl", "max_batch=4", "ignore_eos=true"]
    return [word.format(folder) for word in [*words, "max_new_tokens=12"]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", CALLS)
def test_two_ranks_write_the_bytes_that_one_process_writes(
    kind: str, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["hispec-decode", *call(made, kind, "one")])
    cli_main()
    one, two = [(made / f"{kind}-{who}.jsonl").read_text().splitlines() for who in ("one", "two")]
    assert one[:-1] == two[:-1] and len(one) == len(ROWS)
    assert json.loads(two[-1])["completion_tokens"] == 12


def said(folder: Path) -> list[str]:
    return [f"model={folder}/heads", "exits=[4]", "prompt=Once upon", "max_new_tokens=8", "stats=true"]


@pytest.mark.slow
def test_the_first_rank_alone_speaks(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hispec-decode", *said(made)])
    cli_main()
    assert (made / "stdout").read_text() == capsys.readouterr().out
    assert (made / "stderr").read_text().count("8 tokens, ") == 1


@pytest.mark.slow
def test_ranks_draw_the_same_seeds(made: Path) -> None:
    first, second = [json.loads((made / f"seeds{rank}").read_text()) for rank in (0, 1)]
    assert first == second and first[0] != first[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED)
def test_a_sharded_trunk_gives_the_models_logits_on_every_rank(name: str, made: Path) -> None:
    first, second = [torch.load(made / "families" / name / f"logits{rank}.pt") for rank in (0, 1)]
    assert torch.equal(first, second), "ranks that differ in the last bit may decide differently"
    with torch.no_grad():
        assert_close(first, make(FAMILIES[name])(torch.tensor([PROMPTS[3]])).logits[0])


def test_numbers_of_ranks_that_do_not_divide_the_heads_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    for weights in write_base(tmp_path / "base").glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(ConfigError, match="3 processes cannot share 4 attention heads and 2 KV heads evenly"):
        HiSpecModel.from_base(tmp_path / "base", n_ranks=3)
    with pytest.raises(ConfigError, match=r"start 1 or 2 \(torchrun"):
        HiSpecModel.from_base(tmp_path / "base", n_ranks=4)
    check_shards(make(FAMILIES["llama"]).config, 2)
    make(FAMILIES["opt"]).save_pretrained(tmp_path / "opt")
    with pytest.raises(UnsupportedModelError, match="no tensor-parallel plan for models of type 'opt'"):
        load_base(str(tmp_path / "opt"), n_ranks=2)
