"""Several ranks: what they learn together is what one would learn, whatever is split over them."""

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from several_ranks import in_ranks
from torch import Tensor
from train_fixtures import config, digest, losses, model_folder

from hispec.train.config import TrainConfig
from hispec.train.data import batch_order
from hispec.train.loop import Training
from hispec.train.metrics import read
from hispec.train.stop import Stop

ZERO_SHARD = list(itertools.product((0, 1, 2, 3), ("none", "zero3")))


def learn(settings: TrainConfig, steps: int) -> dict[str, Any]:
    """A few steps of a run: its losses, the heads, and what must not have changed."""
    run = Training(settings)
    before = digest(run.model.trunk.weights())
    for _ in range(steps):
        run.train_step()
    assert digest(run.model.trunk.weights()) == before
    return {
        "heads": run.engine.state(),
        "trained": run.engine.n_parameters,
        "held": sum(p.numel() for p in run.engine.optimized),
        "expected": sum(p.numel() for p in run.model.heads.parameters() if p.requires_grad),
    }


def learn_all(folder: Path, models: list[Path], steps: int) -> dict[tuple[str, int, str], dict[str, Any]]:
    """Every ZeRO stage with a trunk that is replicated or sharded."""
    found = {}
    for model in models:
        for zero, shard in ZERO_SHARD:
            settings = config(
                folder, model, run_dir=str(folder / f"{model.name}_{zero}_{shard}"), data__cache=False,
                train__zero=zero, train__accumulation=2, train__weight_decay=0.1, trunk__shard=shard,
            )  # fmt: skip
            found[model.name, zero, shard] = learn(settings, steps)
    return found


@pytest.mark.slow
def test_t02_t03_t04_two_ranks_agree_whatever_is_split(tmp_path: Path) -> None:
    """ZeRO 0 to 3, trunk replicated or sharded, tied or not: the same losses, the same heads, the same trunk."""
    models = [model_folder(tmp_path, name) for name in ("llama_gqa", "llama_tied")]
    ranks = in_ranks(2, learn_all, tmp_path, models, 3)
    for model in models:
        first = ranks[0][model.name, 0, "none"]
        curve = losses(tmp_path / f"{model.name}_0_none")
        assert len(curve) == 3 and curve[2] < curve[0]
        for zero, shard in ZERO_SHARD:
            found = [rank[model.name, zero, shard] for rank in ranks]
            assert losses(tmp_path / f"{model.name}_{zero}_{shard}") == pytest.approx(curve, rel=1e-3)
            for name, value in first["heads"].items():
                for one in found:
                    torch.testing.assert_close(one["heads"][name], value, rtol=1e-3, atol=1e-3)
            assert {one["trained"] for one in found} == {first["expected"]}
            held = sum(one["held"] for one in found)
            # ZeRO splits the optimizer's tensors over the ranks, a little padded; without it each holds all.
            assert held == 2 * first["expected"] if zero == 0 else held <= first["expected"] + 1024


def start_slowly(settings: TrainConfig) -> tuple[float, float]:
    """When leftovers among the features have been removed, which takes the first rank long, and when the run stands."""
    unlink, removed = Path.unlink, [0.0]

    def slow(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == "features":
            time.sleep(0.5)
            removed.append(time.monotonic())
        unlink(path, missing_ok)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", slow)
        Training(settings)
    return removed[-1], time.monotonic()


def test_no_rank_writes_features_while_the_first_one_removes_leftovers(tmp_path: Path) -> None:
    """What a killed run was just writing goes, before any rank writes again: it looks like what is being written."""
    folder = model_folder(tmp_path, "llama_gqa")
    settings = config(tmp_path, folder, data={"source": [str(chats_file(tmp_path, (5, 9)))], "max_len": 66})
    Training(settings).train_step()
    features = Path(settings.run_dir) / "features"
    (whole,) = features.iterdir()
    for name in (f"{whole.name}.123", ".tmpAbc123", "0123.safetensors"):
        (features / name).write_bytes(b"half")
    (removed, _), (_, ready) = in_ranks(2, start_slowly, settings)
    assert 0.0 < removed < ready
    assert [path.name for path in features.iterdir()] == [whole.name]


def chats_file(folder: Path, answers: tuple[int, ...]) -> Path:
    """Chats of 66 tokens, with answers of so many words; an answer's end marker is one token more to learn."""
    lines = []
    for row, n_words in enumerate(answers):
        words = [f"w{15 + (31 * row + 7 * at) % 190}" for at in range(61)]
        user, assistant = " ".join(words[n_words:]), " ".join(words[:n_words])
        turns = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        lines.append(json.dumps({"messages": turns}))
    target = folder / f"chats{len(answers)}.jsonl"
    target.write_text("\n".join(lines) + "\n")
    return target


def gradients(settings: TrainConfig) -> tuple[list[int], dict[str, Tensor]]:
    """Supervised tokens of each micro batch, and the gradients of the first step, read off AdamW's average."""
    run = Training(settings)
    run.train_step()
    kept = run.engine.snapshot()
    share = 1 - settings.train.betas[0]
    found = {name: value / share for name, value in kept.items() if name.startswith("exp_avg/")}
    return sorted(len(batch.rows_S) for batch in run.batches), found


def test_t09_gradients_count_tokens_however_they_are_grouped(tmp_path: Path) -> None:
    """2, 30, 5 and 60 supervised tokens: all at once, one after another, or two on each of two ranks."""
    folder = model_folder(tmp_path, "llama_gqa")
    rows = chats_file(tmp_path, (1, 29, 4, 59))

    def settings(name: str, micro: int, accumulation: int, zero: int = 0) -> TrainConfig:
        return config(
            tmp_path, folder, run_dir=str(tmp_path / name), data={"source": [str(rows)], "max_len": 66},
            train__clip=0.0, train__micro_batch_tokens=micro, train__accumulation=accumulation, train__zero=zero,
        )  # fmt: skip

    sizes, whole = gradients(settings("whole", 4 * 66, 1))
    assert sizes == [97] and max(float(value.abs().max()) for value in whole.values()) > 1e-3
    grouped = [gradients(settings("accumulated", 66, 4))]
    grouped += [in_ranks(2, gradients, settings(f"ranks{zero}", 66, 2, zero))[0] for zero in (0, 2, 3)]
    for sizes, found in grouped:
        assert sizes == [2, 5, 30, 60]
        for name, value in whole.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


def test_t09_no_window_is_incomplete_and_no_rank_waits(tmp_path: Path) -> None:
    """Five micro batches, four to a step, on two ranks: the second step goes on into the next epoch, on both."""
    rows = chats_file(tmp_path, (1, 29, 4, 59, 12))
    settings = config(
        tmp_path, model_folder(tmp_path, "llama_gqa"), data={"source": [str(rows)], "max_len": 66},
        train__micro_batch_tokens=66, train__accumulation=2, train__max_steps=None, train__epochs=1.0,
        head__kind="norm",
    )  # fmt: skip
    in_ranks(2, run_to_end, settings)
    lines = [line for line in read(Path(settings.run_dir) / "metrics.jsonl") if "loss" in line]
    assert [line["epoch"] for line in lines] == [0.8, 1.6]
    order = batch_order(5, 0)
    other = settings.model_copy(update={"run_dir": str(tmp_path / "other")})
    sizes = [len(batch.rows_S) for batch in Training(other).batches]
    for line, places in zip(lines, (range(4), range(4, 8)), strict=True):
        assert line["supervised"] == sum(sizes[order(place)] for place in places)


def test_t18_of_several_ranks_one_reports(tmp_path: Path) -> None:
    """Offline, two ranks: one folder of one run, by the first."""
    settings = config(
        tmp_path, model_folder(tmp_path, "llama_gqa"), wandb__mode="offline", head__kind="norm", train__max_steps=20,
        eval__max_prompts=1,
    )  # fmt: skip
    in_ranks(2, run_to_end, settings)
    assert len(list((Path(settings.run_dir) / "wandb").glob("offline-run-*"))) == 1
    assert [line["step"] for line in read(Path(settings.run_dir) / "metrics.jsonl")] == [*range(1, 21), 20]


def run_to_end(settings: TrainConfig) -> None:
    """A whole run, started or gone on with."""
    Training(settings).run(Stop())
