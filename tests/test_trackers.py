"""Curves for trackers, and trackers without a network."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from train_fixtures import config, model_folder

from hispec.errors import ConfigError
from hispec.train.loop import train
from hispec.train.metrics import read
from hispec.train.trackers import curves, start


def test_curves_are_named_by_exit_and_judge() -> None:
    values = {
        "loss": 2.0,
        "heads": [{"exit": 4, "top1": 0.5}, {"exit": 8, "top1": 0.75}],
        "eval": {"policy": "fixed:2", "judges": [{"judge": "full model", "accepted": 0.25, "judged_at": [4, 1]}]},
    }
    assert curves(values) == {
        "loss": 2.0,
        "exit 4/top1": 0.5,
        "exit 8/top1": 0.75,
        "eval/full model/accepted": 0.25,
    }


def test_t18_tensorboard_gets_what_metrics_jsonl_gets(tmp_path: Path) -> None:
    settings = config(tmp_path, model_folder(tmp_path, "llama_gqa"), tensorboard=True, head__kind="norm", eval__every=2)
    train(settings)
    # By name, since it has no types.
    loader: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = loader.EventAccumulator(str(Path(settings.run_dir) / "tensorboard"))
    events.Reload()
    lines = read(Path(settings.run_dir) / "metrics.jsonl")
    losses = [(line["step"], pytest.approx(line["loss"])) for line in lines if "loss" in line]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == losses
    decoded = [line["eval"]["measured_tokens_per_full_pass"] for line in lines if "eval" in line]
    found = [event.value for event in events.Scalars("eval/measured_tokens_per_full_pass")]
    assert found == pytest.approx(decoded) and len(found) == 2
    assert {"exit 2/top1", "exit 4/acceptance", "eval/exit 2/tokens_per_full_pass"} <= set(events.Tags()["scalars"])


@pytest.mark.parametrize(
    ("changes", "name", "message"),
    [
        ({"tensorboard": True}, "torch.utils.tensorboard", "tensorboard=true: tensorboard is not installed; run: pip"),
        ({"wandb__mode": "offline"}, "wandb", "wandb.mode: wandb is not installed; run: pip install wandb"),
    ],
)
def test_t18_a_tracker_that_is_not_installed_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], name: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=message):
        start(tmp_path, config(tmp_path, "tiny", **changes), 0)
    assert start(tmp_path, config(tmp_path, "tiny"), 0) == []


@pytest.mark.slow
def test_t18_trackers_without_a_network(tmp_path: Path) -> None:
    """Where only this machine is reached: default, offline and disabled runs end, online says what is wrong."""
    alone = ["unshare", "--map-root-user", "--net"]
    tools = all(shutil.which(tool) for tool in ("unshare", "ip"))
    if not tools or subprocess.run([*alone, "ip", "link", "set", "lo", "up"], capture_output=True).returncode:
        pytest.skip("no network namespaces here")
    words = "recipe=tiny train.max_steps=20 eval.max_prompts=1 eval.max_new_tokens=4 data.stdlib_tokens=1000"
    code = f"""
from hispec.train.cli import run
from hispec.errors import ConfigError
run("{words} run_dir={tmp_path}/default".split())
run("{words} run_dir={tmp_path}/offline wandb.mode=offline tensorboard=true".split())
run("{words} run_dir={tmp_path}/disabled wandb.mode=disabled".split())
try:
    run("{words} run_dir={tmp_path}/online wandb.mode=online".split())
except ConfigError as error:
    print(error)
"""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    environment |= {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"], "WANDB_MODE": "online"}
    script = f'ip link set lo up && exec "{sys.executable}" -c "$0"'
    done = subprocess.run([*alone, "sh", "-c", script, code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("default", "offline", "disabled"):
        assert [line["step"] for line in read(tmp_path / name / "metrics.jsonl")] == [*range(1, 21), 20]
        assert list((tmp_path / name).glob("wandb/offline-run-*")) == [] or name == "offline"
    assert len(list((tmp_path / "offline" / "wandb").glob("offline-run-*"))) == 1
    assert list((tmp_path / "offline" / "tensorboard").iterdir())
    assert done.stdout.startswith("wandb.mode=online: ") and "offline needs neither login nor network" in done.stdout
