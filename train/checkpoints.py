"""Checkpoints of a run in progress: which are whole, which is the newest, and whether a run may go on from it.

run_dir/checkpoints/step_000120/    DeepSpeed's files, and state.json, written last: with it the checkpoint is whole
"""

import json
import shutil
from pathlib import Path
from typing import Any

from hispec.errors import CheckpointError, ConfigError, FileError
from hispec.train.config import TrainConfig
from hispec.train.engine import Engine

STATE = "state.json"
# Settings that do not change what is learned.
FREE = {"train": {"save_every", "keep"}}


class Checkpoints:
    """The checkpoints below a run folder."""

    def __init__(self, run_dir: Path, config: TrainConfig) -> None:
        self.folder = run_dir / "checkpoints"
        self.config = config

    def resume(self, engine: Engine) -> dict[str, Any]:
        """Load the newest whole checkpoint into `engine` and return its state; empty when there is none.

        Raises:
            ConfigError: it belongs to other settings, or another number of ranks.
        """
        if self.config.resume == "never":
            if engine.rank == 0:
                shutil.rmtree(self.folder, ignore_errors=True)
            return {}
        found = self._whole()
        if not found:
            return {}
        try:
            state: dict[str, Any] = json.loads((found[-1] / STATE).read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise CheckpointError(f"{found[-1] / STATE} cannot be read ({error}); remove {found[-1]}") from None
        self._check(state, found[-1])
        if state["world"] != engine.world:
            raise ConfigError(
                f"{found[-1]} was saved by {state['world']} ranks, this run has {engine.world};"
                " start as many, or give resume=never"
            )
        engine.load(self.folder, found[-1].name)
        return state

    def save(self, engine: Engine, step: int, state: dict[str, Any]) -> Path:
        """Write a checkpoint and remove those that are too old."""
        tag = f"step_{step:06d}"
        engine.save(self.folder, tag)
        if engine.rank == 0:
            whole = {"step": step, "world": engine.world, "settings": _settings(self.config), **state}
            try:
                # Under its name only when complete.
                new = self.folder / tag / f"{STATE}.new"
                new.write_text(json.dumps(whole, indent=2) + "\n")
                new.replace(self.folder / tag / STATE)
            except OSError as error:
                raise FileError(f"cannot write checkpoint {self.folder / tag}: {error.strerror}") from None
            for old in self._whole()[: -self.config.train.keep]:
                shutil.rmtree(old, ignore_errors=True)
        return self.folder / tag

    def _whole(self) -> list[Path]:
        return sorted(path.parent for path in self.folder.glob(f"step_*/{STATE}"))

    def _check(self, state: dict[str, Any], where: Path) -> None:
        now, then = _flat(_settings(self.config)), _flat(state["settings"])
        for key in sorted(now.keys() | then.keys()):
            if now.get(key) != then.get(key):
                raise ConfigError(
                    f"{where.parent.parent} was trained with {key}={then.get(key)!r}, now it is {now.get(key)!r};"
                    " give the same, another run_dir, or resume=never to start over"
                )


def _settings(config: TrainConfig) -> dict[str, Any]:
    kept = {"model", "revision", "dtype", "chat_template", "exits", "head", "heads", "data", "train"}
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
