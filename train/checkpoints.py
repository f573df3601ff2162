"""Checkpoints of a run in progress: written whole or not at all, and the newest good one found again.

run_dir/checkpoints/step_000120/state.safetensors    heads and optimizer, whole, whatever ranks they were split over
                                state.json           step, place in the data, settings
"""

import json
import logging
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hispec.base import new_folder
from hispec.errors import CheckpointError, ConfigError, first_line
from hispec.train import ranks
from hispec.train.config import TrainConfig

log = logging.getLogger("hispec")
STATE, TENSORS = "state.json", "state.safetensors"
# Settings that do not change what is learned.
FREE = {"train": {"save_every", "keep", "zero", "offload"}}


class Checkpoint(NamedTuple):
    """What a run goes on from: numbers on every rank, tensors on the first alone."""

    state: dict[str, Any]
    tensors: dict[str, Tensor]


# Where a new run starts.
NOTHING = Checkpoint({"step": 0, "place": 0, "seconds": 0.0, "losses": [], "world": 0}, {})


class Checkpoints:
    """The checkpoints below a run folder; the first rank alone reads and writes them."""

    def __init__(self, run_dir: Path, config: TrainConfig) -> None:
        self.folder = run_dir / "checkpoints"
        self.config = config

    def newest(self) -> Checkpoint | None:
        """The newest good checkpoint; None when there is none, or resume=never.

        Raises:
            ConfigError: it belongs to other settings. CheckpointError: there are some, but none can be read.
        """
        found = self._newest() if ranks.rank() == 0 else None
        state = ranks.from_first(None if found is None else found.state)
        return None if state is None else Checkpoint(state, {} if found is None else found.tensors)

    def _newest(self) -> Checkpoint | None:
        if self.config.resume == "never":
            shutil.rmtree(self.folder, ignore_errors=True)
            return None
        for path in self.folder.glob(".step_*"):
            log.warning("skipped %s: half-written by a run that was killed", path)
            shutil.rmtree(path, ignore_errors=True)
        skipped = []
        for path in reversed(self._all()):
            try:
                state = json.loads((path / STATE).read_text())
                found = Checkpoint(state, load_file(path / TENSORS))
            except (OSError, ValueError, SafetensorError) as error:
                skipped.append(path)
                log.warning("skipped %s: damaged or half-written (%s)", path, first_line(error))
                continue
            self._check(state, path)
            return found
        if skipped:
            names = ", ".join(path.name for path in skipped)
            raise CheckpointError(
                f"no checkpoint in {self.folder} can be read ({names});"
                " give resume=never to start over, or another run_dir"
            )
        return None

    def save(self, step: int, state: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
        """Write a checkpoint and remove those that are too old.

        Raises:
            FileError: the place cannot be written.
        """
        target = self.folder / f"step_{step:06d}"
        if ranks.rank() == 0:
            whole = {"step": step, "world": ranks.world(), "settings": settings(self.config), **state}
            with new_folder(target) as new:
                save_file(tensors, new / TENSORS)
                (new / STATE).write_text(json.dumps(whole, indent=2) + "\n")
            for old in self._all()[: -self.config.train.keep]:
                shutil.rmtree(old, ignore_errors=True)
        ranks.meet()
        return target

    def _all(self) -> list[Path]:
        steps = {path: path.name.removeprefix("step_") for path in self.folder.glob("step_*")}
        return sorted((path for path, step in steps.items() if step.isdigit()), key=lambda path: int(steps[path]))

    def _check(self, state: dict[str, Any], where: Path) -> None:
        now, then = _flat(settings(self.config)), _flat(state["settings"])
        for key in sorted(now.keys() | then.keys()):
            if now.get(key) != then.get(key):
                raise ConfigError(
                    f"{where.parent.parent} was trained with {key}={then.get(key)!r}, now it is {now.get(key)!r};"
                    " give the same, another run_dir, or resume=never to start over"
                )


def settings(config: TrainConfig) -> dict[str, Any]:
    """What a run must keep to when it is gone on with."""
    kept = {"model", "revision", "dtype", "chat_template", "exits", "head", "heads", "data", "train"}
    if config.exits == "auto":
        kept.add("calibration")
    dumped: dict[str, Any] = config.model_dump(mode="json", include=kept)
    for part, names in FREE.items():
        for name in names:
            dumped[part].pop(name)
    return dumped


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
