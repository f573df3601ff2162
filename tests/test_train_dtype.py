"""Precisions of the trunk: heads are float32 in all of them, and their gradients are right."""

from pathlib import Path

import pytest
import torch
from train_fixtures import config, model_folder

from hispec.train import setup
from hispec.train.features import compute
from hispec.train.lessons import step_losses
from hispec.train.loop import Training
from hispec.train.schedule import learning_rate
from hispec.train.student import Student


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("zero", [0, 2])
def test_t06_updates_are_those_of_plain_adamw(tmp_path: Path, dtype: str, zero: int) -> None:
    """Two steps in low precision: no loss scale that was never applied, no gradient of the step before."""
    settings = config(
        tmp_path, model_folder(tmp_path, "llama_gqa"), dtype=dtype, train__zero=zero, train__clip=0.0,
        train__max_steps=2, head__kind="mlp",
    )  # fmt: skip
    run, twin = Training(settings), setup.prepare(settings)
    student = Student(twin.heads)
    trained = dict(student.heads.named_parameters())
    start = {name: value.detach().clone() for name, value in trained.items()}
    optimizer = torch.optim.AdamW(trained.values(), betas=settings.train.betas, weight_decay=0.0)
    for step in range(2):
        run.train_step()
        batch = twin.batches[run.order(step)]
        features = compute(twin.trunk, twin.model.exits, batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            hidden = {exit_: state_TD.float() for exit_, state_TD in features.hidden.items()}
            readings = student(hidden, batch.ids_T, batch.positions_T, batch.rows_S, batch.lengths)
        loss = step_losses(twin.model.heads_list, readings, features.truth, settings.train.loss, float(step))[0]
        optimizer.zero_grad()
        torch.autograd.backward(loss / len(batch.rows_S))
        optimizer.param_groups[0]["lr"] = learning_rate(settings.train, step, 2)
        optimizer.step()
        state = run.engine.state()
        for name, value in trained.items():
            ours, theirs = state[name] - start[name], value.detach() - start[name]
            assert float((ours - theirs).norm()) <= 0.02 * float(theirs.norm()), name
    assert all(float((state[name] - start[name]).abs().max()) > 0 for name in trained)
