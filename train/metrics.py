"""Where numbers go: metrics.jsonl always, trackers on request."""

import importlib.metadata
import json
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from hispec.errors import FileError
from hispec.train import trackers
from hispec.train.config import TrainConfig
from hispec.version import __version__

PACKAGES = ("torch", "transformers", "deepspeed", "safetensors")


class Metrics:
    """The run folder's records; of all ranks only the first writes."""

    def __init__(self, folder: Path, config: TrainConfig, start_step: int, writes: bool = True) -> None:
        """Opens `folder`/metrics.jsonl for steps after `start_step`; lines of steps that are run again are dropped.

        Raises:
            FileError: the folder cannot be written. ConfigError: a tracker is asked for and cannot start.
        """
        self.path = folder / "metrics.jsonl"
        self._writes = writes
        self._trackers: list[trackers.Tracker] = []
        if not writes:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
            (folder / "environment.json").write_text(json.dumps(environment(), indent=2) + "\n")
            kept = [line for line in read(self.path) if line["step"] <= start_step]
            new = self.path.with_suffix(".new")
            new.write_text("".join(json.dumps(line) + "\n" for line in kept))
            new.replace(self.path)
        except OSError as error:
            raise FileError(f"cannot write run folder {folder}: {error.strerror}; give another run_dir") from None
        self._trackers = trackers.start(folder, config, start_step)

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Write one line; values may be nested.

        Raises:
            FileError: it cannot be written.
        """
        if not self._writes:
            return
        try:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
        except OSError as error:
            raise FileError(f"cannot write {self.path}: {error.strerror}; free space and go on") from None
        for tracker in self._trackers:
            tracker.log(step, trackers.curves(values))

    def close(self) -> None:
        """Let the trackers finish."""
        for tracker in self._trackers:
            tracker.close()


def read(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a metrics file; none if there is no file."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def environment() -> dict[str, Any]:
    """What a run depends on besides its settings: command, versions, machine."""
    return {
        "command": shlex.join(sys.argv),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "hispec": __version__,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
        "machine": platform.platform(),
        "device": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
    }
