"""Heads go to the Hub and come back: the real client against a stand-in of the endpoints it calls."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_stand_in import HubStandIn, hub
from train_fixtures import model_folder

from hispec import HiSpecModel
from hispec.config import HeadConfig

HEADS = {"README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors"}


@pytest.fixture
def heads(tmp_path: Path) -> HiSpecModel:
    model = HiSpecModel.from_base(model_folder(tmp_path, "llama_gqa"), (2, 4), HeadConfig(kind="mlp"))
    model.save_pretrained(tmp_path / "heads")
    return model


def client(server: HubStandIn, home: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process whose Hub is the stand-in: the client reads its address when it is imported."""
    own = {"HF_ENDPOINT": server.url, "HF_HOME": str(home), "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1"}
    run = f"from hispec import HiSpecModel\nfrom hispec.errors import command\n{code}\ncommand(main)()"
    return subprocess.run(
        [sys.executable, "-c", run],
        env={**os.environ, **own, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_heads_are_pushed_and_loaded_by_id_and_offline(tmp_path: Path, heads: HiSpecModel) -> None:
    push = (
        f"def main(_): HiSpecModel.from_pretrained({str(tmp_path / 'heads')!r}).push_to_hub('org/heads', private=True)"
    )
    load = "def main(_): print(HiSpecModel.from_pretrained('org/heads').exits)"
    with hub() as server:
        pushed = client(server, tmp_path / "home", push)
        assert pushed.returncode == 0, pushed.stderr
        files = server.repos["org/heads"]
        assert set(files) <= HEADS and {"README.md", "config.json", "model.safetensors"} <= set(files)
        assert files["model.safetensors"] == (tmp_path / "heads" / "model.safetensors").read_bytes()
        assert b'from_pretrained("org/heads")' in files["README.md"]
        assert client(server, tmp_path / "home", load).stdout == "(2, 4)\n"
        fetched = len(server.calls)
        assert client(server, tmp_path / "home", load, HF_HUB_OFFLINE="1").stdout == "(2, 4)\n"
        assert len(server.calls) == fetched


def test_a_repository_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with hub() as server:
        missing = client(server, tmp_path / "home", "def main(_): HiSpecModel.from_pretrained('org/nothing')")
    assert missing.returncode == 2
    assert missing.stderr.strip().splitlines()[-1].startswith("error: heads 'org/nothing': neither a folder here nor")
