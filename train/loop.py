"""The training loop, as prose.

Letters: T tokens of a micro batch, S supervised positions, D hidden size, M metrics.
"""

import contextlib
import logging
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from hispec.errors import DivergedError, FileError
from hispec.push import PushOptions, again, push
from hispec.train import checkpoints, ranks, setup
from hispec.train.batch import solve
from hispec.train.choice import Choice
from hispec.train.config import TrainConfig
from hispec.train.data import MicroBatch, batch_order
from hispec.train.engine import Engine
from hispec.train.evaluate import Evaluation
from hispec.train.features import FeatureCache
from hispec.train.lessons import step_losses
from hispec.train.losses import METRICS
from hispec.train.metrics import Metrics
from hispec.train.optim_config import OptimConfig
from hispec.train.report import write_report
from hispec.train.schedule import learning_rate
from hispec.train.stop import Stop

log = logging.getLogger("hispec")
# Of the data's settings, what finished heads say of themselves.
TOLD = {"source", "prompts", "own_prompts", "stdlib_prompts", "stdlib_tokens", "answers", "temperature"}


class Interrupted(SystemExit):
    """Training was stopped by a signal; what was learned is saved."""


def train(config: TrainConfig, stop: Stop | None = None) -> dict[str, Any]:
    """Run a recipe to its end: heads in the export folder. Returns what the last evaluation measured.

    Raises:
        HiSpecError: the user's own mistakes, before the first step. DivergedError: the loss is not finite.
        Interrupted: after a signal, with a checkpoint saved.
    """
    return Training(config).run(stop or Stop())


class Training:
    """One run: what it holds, and the loop over it."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.folder = Path(config.run_dir)
        self.triple = solve(config.train, ranks.world())
        self.checkpoints = checkpoints.Checkpoints(self.folder, config)
        found = self.checkpoints.newest() or checkpoints.NOTHING
        self.step, self.place = found.state["step"], found.state["place"]
        self.seconds, self.losses = found.state["seconds"], found.state["losses"]
        self.saved_by = found.state["world"]
        chosen = found.state.get("choice")
        prepared = setup.prepare(config, None if chosen is None else Choice.build(chosen))
        self.model, self.batches, self.choice = prepared.model, prepared.batches, prepared.choice
        self.engine = Engine(prepared.heads, config.train, self.triple.accumulation, found.tensors, self.step)
        self.vocab_ids = [head.vocab_ids for head in self.model.heads_list]
        self.cache = FeatureCache(
            self.folder / "features" if config.data.cache else None, self.model.trunk, self.model.exits
        )
        self.order = batch_order(len(self.batches), config.train.seed)
        self.per_step = self.triple.accumulation * self.triple.world
        self.steps = n_steps(config.train, len(self.batches), self.per_step, self.step, self.place)
        self.metrics = Metrics(self.folder, config, self.step, writes=ranks.rank() == 0)
        self.held_out = prepared.held_out
        self._evaluation: Evaluation | None = None
        self.cache.prune(self.batches)

    def run(self, stop: Stop) -> dict[str, Any]:
        """Train from where the run stands to its end, evaluate, export."""
        self._announce()
        size = sum(sum(batch.lengths) for batch in self.batches) / len(self.batches) * self.per_step
        with stop, self._bar() as bar:
            while self.step < self.steps:
                start = time.perf_counter()
                values = self.train_step()
                self.seconds += time.perf_counter() - start
                bar.update()
                bar.set_postfix_str(
                    f"loss {values['loss']:.3f}, {size / (time.perf_counter() - start):.0f} tokens/s", refresh=False
                )
                # One rank's signal stops them all.
                code = ranks.largest(stop.after(self.step))
                if code and self.step < self.steps:
                    self._interrupt(code)
                every = self.config.eval.every
                if every and self.step % every == 0 and self.step < self.steps:
                    self.metrics.log(self.step, {"eval": self.evaluate()})
                if self.step % self.config.train.save_every == 0 or self.step == self.steps:
                    self._save()
        measured = self.evaluate()
        self.metrics.log(self.step, {"eval": measured})
        self._export(measured)
        self.metrics.close()
        return measured

    def train_step(self) -> dict[str, Any]:
        """One optimizer step over the next window of micro batches; returns and logs its means over positions."""
        window = [self.batches[self.order(self.place + number)] for number in range(self.per_step)]
        # Of the whole step and all ranks, so that no token counts more for sharing a batch with few others.
        n_supervised = sum(len(batch.rows_S) for batch in window)
        lr = learning_rate(self.config.train, self.step, self.steps)
        sums_HM = torch.zeros(len(self.vocab_ids), len(METRICS), dtype=torch.float64, device=self.model.trunk.device)
        for batch in window[ranks.rank() :: ranks.world()]:
            loss, batch_HM = self._losses(batch)
            self.engine.backward(loss / n_supervised)
            self.engine.step(lr)
            sums_HM += batch_HM
        means = (ranks.sum_over(sums_HM) / n_supervised).tolist()
        self.step += 1
        self.place += self.per_step
        return self._report(lr, n_supervised, means)

    def _losses(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Loss of all heads summed over positions, and the metrics of each, [H, M]."""
        trunk = self.model.trunk
        features = self.cache.get(batch)
        ids_T, positions_T, rows_S = (x.to(trunk.device) for x in (batch.ids_T, batch.positions_T, batch.rows_S))
        # Heads are float32; beside a bfloat16 trunk their products are made in bfloat16. Beside a float16 one they are
        # not: its range is too small for gradients.
        with torch.autocast(trunk.device.type, torch.bfloat16, enabled=trunk.dtype == torch.bfloat16):
            hidden = {exit_: state_TD.float() for exit_, state_TD in features.hidden.items()}
            readings = self.engine.readings(hidden, ids_T, positions_T, rows_S, batch.lengths)
        progress = self.step / max(1, self.steps - 1)
        return step_losses(self.model.heads_list, readings, features.truth, self.config.train.loss, progress)

    def _report(self, lr: float, n_supervised: int, means: list[list[float]]) -> dict[str, Any]:
        heads = [
            {"exit": exit_, **dict(zip(METRICS, row, strict=True))}
            for exit_, row in zip(self.model.exits, means, strict=True)
        ]
        loss = sum(row[0] for row in means)
        if not math.isfinite(loss):
            raise DivergedError(
                f"the loss is {loss} at step {self.step}; lower train.lr (now {self.config.train.lr:g}) and start over"
            )
        self.losses = [self.losses[0] if self.losses else loss, loss]
        epoch = self.place / len(self.batches)
        values = {"loss": loss, "lr": lr, "epoch": round(epoch, 4), "supervised": n_supervised, "heads": heads}
        self.metrics.log(self.step, values)
        return values

    def evaluate(self) -> dict[str, Any]:
        """Measure the heads as they are now, in the precision they are exported in."""
        self._load_heads()
        if self._evaluation is None:
            self._evaluation = Evaluation(self.model, self.held_out, self.config.eval)
        measured = self._evaluation(self.model)
        exits = ", ".join(f"exit {row['exit']}: top-1 {row['top1']:.1%}" for row in measured["exits"])
        simulated, real = measured["simulated_tokens_per_full_pass"], measured["measured_tokens_per_full_pass"]
        log.info("step %d: %s; tokens per full pass %.2f simulated, %.2f decoded", self.step, exits, simulated, real)
        return measured

    def _load_heads(self) -> None:
        self.model.heads.load_state_dict(self.engine.state())

    def _export(self, measured: dict[str, Any]) -> None:
        if ranks.rank() > 0:
            return
        train = self.config.train
        self.model.training = {
            "steps": self.step,
            "tokens": sum(sum(batch.lengths) for batch in self.batches),
            "supervised_tokens": sum(len(batch.rows_S) for batch in self.batches),
            "epochs": round(self.place / len(self.batches), 3),
            "minutes": round(self.seconds / 60, 2),
            "trainable_parameters": self.engine.n_parameters,
            "loss_first": self.losses[0],
            "loss_last": self.losses[-1],
            "loss": train.loss.model_dump(exclude={"chunk"}),
            "data": self.config.data.model_dump(include=TOLD),
        }
        if self.choice is not None:
            self.model.training["exits"] = self.choice.summary()
        self.model.metrics = measured
        self.model.save_pretrained(self.config.heads_folder)
        log.info("heads exported to %s", self.config.heads_folder)
        assert self._evaluation is not None
        log.info("report written to %s", write_report(self.folder, self.model, self._evaluation.decoded))
        if self.config.export.push is not None:
            self._push(self.config.export.push)

    def _push(self, repo_id: str) -> None:
        options = PushOptions(private=self.config.export.private, revision=self.config.export.revision)
        try:
            log.info("heads pushed: %s", push(self.config.heads_folder, repo_id, options))
        except FileError as error:  # the run itself has succeeded
            log.warning(
                "%s; the heads are saved, to try again: %s", error, again(self.config.heads_folder, repo_id, options)
            )

    def _save(self) -> Path:
        state: dict[str, Any] = {"place": self.place, "seconds": self.seconds, "losses": self.losses}
        if self.choice is not None:
            state["choice"] = self.choice.model_dump()
        return self.checkpoints.save(self.step, state, self.engine.snapshot())

    def _interrupt(self, code: int) -> None:
        where = self._save()
        self.metrics.close()
        ranks.meet()  # a launcher ends all ranks as soon as one has left
        log.warning(
            "stopped after step %d of %d; saved %s; the same command goes on from there", self.step, self.steps, where
        )
        raise Interrupted(code)

    def _announce(self) -> None:
        log.info(
            "%s trainable parameters, %d micro batches an epoch", f"{self.engine.n_parameters:,}", len(self.batches)
        )
        log.info("%d steps; tokens a step, at most: %s", self.steps, self.triple)
        if self.step:
            log.info("going on after step %d", self.step)
        if self.saved_by not in (0, self.triple.world):
            log.info("saved by %d ranks, going on with %d", self.saved_by, self.triple.world)

    def _bar(self) -> contextlib.AbstractContextManager[Any]:
        quiet = True if ranks.rank() else None  # None: quiet unless a person watches
        return tqdm(total=self.steps, initial=self.step, desc="train", unit="step", disable=quiet)


def n_steps(config: OptimConfig, n_batches: int, per_step: int, step: int = 0, place: int = 0) -> int:
    """Optimizer steps of a run whose first `step` took `place` micro batches, and whose others take `per_step` each.

    The last window may reach into one more epoch.
    """
    return config.max_steps or step + max(0, math.ceil((config.epochs * n_batches - place) / per_step))
