"""Going on where a run was stopped: by a signal or a kill, with the same number of ranks or another."""

import json
import logging
import random
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from several_ranks import in_ranks, start
from train_fixtures import config, losses, model_folder

from hispec.errors import CheckpointError
from hispec.train.config import TrainConfig, TrunkConfig
from hispec.train.loop import Interrupted, Training, train
from hispec.train.metrics import read
from hispec.train.stop import Stop


class StopAfter(Stop):
    """Stops as SIGTERM does, at a known step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def after(self, step: int) -> int:
        return 143 if step >= self.step else 0


def twenty(folder: Path, name: str, model: Path, zero: int) -> TrainConfig:
    """Twenty steps of six micro batches, on however many ranks."""
    return config(
        folder, model, run_dir=str(folder / name / f"zero{zero}"), head__kind="mlp", train__max_steps=20,
        train__zero=zero, train__micro_batch_tokens=64, train__global_batch_tokens=6 * 64, train__lr=1e-2,
        train__warmup=0.25, eval__max_prompts=1,
    )  # fmt: skip


def straight_and_stopped(folder: Path, model: Path, stages: tuple[int, ...]) -> None:
    """A run of twenty steps, and one that is stopped after ten."""
    for zero in stages:
        Training(twenty(folder, "straight", model, zero)).run(Stop())
        with pytest.raises(Interrupted):
            Training(twenty(folder, "stopped", model, zero)).run(StopAfter(10))


def gone_on(folder: Path, name: str, model: Path, stages: tuple[int, ...]) -> None:
    """The other ten steps, of copies of the stopped runs."""
    for zero in stages:
        run = Training(twenty(folder, name, model, zero))
        assert run.step == 10 and run.place == 60
        run.run(Stop())


@pytest.mark.slow
@pytest.mark.parametrize(("world", "others"), [(2, (1, 3)), (1, (2,))])
def test_t11_t12_twenty_steps_are_ten_and_ten(tmp_path: Path, world: int, others: tuple[int, ...]) -> None:
    """The same to the bit on as many ranks, and to 1% in loss on another number, at every ZeRO stage."""
    stages = (1, 2, 3)
    model = model_folder(tmp_path, "llama_gqa")
    in_ranks(world, straight_and_stopped, tmp_path, model, stages)
    for n_ranks in (world, *others):
        name = f"on{n_ranks}"
        shutil.copytree(tmp_path / "stopped", tmp_path / name)
        in_ranks(n_ranks, gone_on, tmp_path, name, model, stages)
        for zero in stages:
            curve = [read(tmp_path / run / f"zero{zero}" / "metrics.jsonl") for run in ("straight", name)]
            first, second = ([line for line in lines if "loss" in line] for lines in curve)
            assert [line["step"] for line in second] == list(range(1, 21))
            assert [line["lr"] for line in second] == [line["lr"] for line in first]
            if n_ranks == world:
                assert first == second
                exported = [tmp_path / run / f"zero{zero}" / "heads" for run in ("straight", name)]
                assert len({(folder / "model.safetensors").read_bytes() for folder in exported}) == 1
            else:
                assert [line["loss"] for line in second] == pytest.approx([line["loss"] for line in first], rel=1e-2)


def many(folder: Path, name: str, model: Path) -> TrainConfig:
    """A run that saves after every step."""
    return config(
        folder, model, run_dir=str(folder / name), head__kind="norm", train__max_steps=250, train__save_every=1,
        eval__max_prompts=1, eval__max_new_tokens=4,
    )  # fmt: skip


def go_on(settings: TrainConfig) -> None:
    """Go on to the end; where it goes on from is written down before."""
    run = Training(settings)
    with (Path(settings.run_dir) / "starts.txt").open("a") as file:
        file.write(f"{run.step}\n")
    run.run(Stop())


def good_checkpoints(run_dir: str) -> list[int]:
    """Steps of the checkpoints that stand under their own names."""
    return [int(path.name.removeprefix("step_")) for path in Path(run_dir).glob("checkpoints/step_*")]


@pytest.mark.slow
def test_ten_kills_in_a_row_lose_nothing(tmp_path: Path) -> None:
    """kill -9 at random moments: each run goes on from the newest checkpoint, the last one ends as an unbroken one."""
    model = model_folder(tmp_path, "llama_gqa")
    straight, killed = many(tmp_path, "straight", model), many(tmp_path, "killed", model)
    in_ranks(1, good_checkpoints, killed.run_dir)  # what all processes are forked from is there now
    began = time.perf_counter()
    in_ranks(1, go_on, straight)
    whole = time.perf_counter() - began
    rng = random.Random(4)
    starts = Path(killed.run_dir) / "starts.txt"
    for _ in range(10):
        before = max(good_checkpoints(killed.run_dir), default=0)
        n_starts = len(starts.read_text().split()) if starts.is_file() else 0
        process, connection = start(go_on, killed)
        process.join(rng.uniform(0.2, 0.6) * whole)
        process.kill()
        process.join()
        connection.close()
        new = starts.read_text().split()[n_starts:] if starts.is_file() else []
        assert new in ([], [str(before)])
    assert good_checkpoints(killed.run_dir), "no kill came after a checkpoint: the test has tested nothing"
    in_ranks(1, go_on, killed)
    first, second = losses(straight.run_dir), losses(killed.run_dir)
    assert len(second) == 250 and second == pytest.approx(first, rel=1e-3)


def test_a_half_written_checkpoint_is_skipped_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = config(tmp_path, model_folder(tmp_path, "llama_gqa"), train__save_every=1, head__kind="norm")
    train(settings)
    second, third = sorted((Path(settings.run_dir) / "checkpoints").iterdir())
    (third / "state.safetensors").write_bytes((third / "state.safetensors").read_bytes()[:200])
    shutil.copytree(third, third.with_name(".step_000004-a1b2"))  # what a kill leaves behind
    with caplog.at_level(logging.WARNING, "hispec"):
        assert Training(settings).step == 2
    lines = [record.getMessage() for record in caplog.records]
    assert any("skipped" in line and ".step_000004-a1b2: half-written" in line for line in lines)
    assert any("skipped" in line and "step_000003: damaged or half-written" in line for line in lines)
    assert sorted(path.name for path in second.parent.iterdir()) == [second.name, third.name]
    (second / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* \(step_000003, step_000002\); give resume=never"):
        Training(settings)


def test_other_ranks_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """T11: never a silent restart, and never a silent change."""
    settings = config(tmp_path, model_folder(tmp_path, "llama_gqa"), head__kind="norm", train__max_steps=4)
    in_ranks(2, stop_after_two, settings)
    with caplog.at_level(logging.INFO, "hispec"):
        train(settings)
    assert "saved by 2 ranks, going on with 1" in caplog.text and "going on after step 2" in caplog.text
    epochs = [line["epoch"] for line in read(Path(settings.run_dir) / "metrics.jsonl") if "loss" in line]
    per_batch = epochs[0] / 2
    assert epochs == pytest.approx([per_batch * place for place in (2, 4, 5, 6)], abs=1e-3)


def stop_after_two(settings: TrainConfig) -> None:
    """The first two steps."""
    with pytest.raises(Interrupted):
        Training(settings).run(StopAfter(2))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_averages_in_main_memory_change_nothing(tmp_path: Path, zero: int) -> None:
    folder = model_folder(tmp_path, "llama_gqa")
    runs = {
        offload: config(
            tmp_path, folder, run_dir=str(tmp_path / str(offload)), train__zero=zero, train__offload=offload,
            train__max_steps=4, head__kind="norm",
        )
        for offload in (False, True)
    }  # fmt: skip
    train(runs[False])
    with pytest.raises(Interrupted):
        Training(runs[True]).run(StopAfter(2))
    train(runs[True])
    assert losses(runs[True].run_dir) == pytest.approx(losses(runs[False].run_dir), rel=1e-5)


def test_c04_checkpoints_hold_heads_and_averages_only(tmp_path: Path) -> None:
    """C04: what is saved is the heads' tensors three times over; the trunk comes back from its source."""
    settings = config(tmp_path, model_folder(tmp_path, "llama_gqa"), trunk__shard="zero3", head__kind="norm")
    train(settings)
    state = Path(settings.run_dir) / "checkpoints" / "step_000003"
    again = Training(settings)
    assert again.step == 3
    kept = load_file(state / "state.safetensors")
    assert sum(value.numel() for value in kept.values()) == 3 * again.engine.n_parameters
    assert json.loads((state / "state.json").read_text())["world"] == 1
    ids_T = torch.tensor([5, 17, 101, 33])
    plain = Training(settings.model_copy(update={"run_dir": str(tmp_path / "plain"), "trunk": TrunkConfig()}))
    torch.testing.assert_close(again.model.trunk.logits(ids_T), plain.model.trunk.logits(ids_T))
