"""Weights & Biases and TensorBoard, on request. The only file that knows them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from hispec.errors import ConfigError, first_line
from hispec.train.config import TrainConfig


class Tracker(Protocol):
    """Shows curves to a person."""

    def log(self, step: int, curves: dict[str, float]) -> None:
        """Add a point to each curve."""

    def close(self) -> None:
        """Nothing more will come."""


def start(folder: Path, config: TrainConfig, start_step: int) -> list[Tracker]:
    """Those that are asked for, for steps after `start_step`.

    Raises:
        ConfigError: one is not installed, or cannot start.
    """
    trackers: list[Tracker] = []
    if config.wandb.mode != "disabled":
        trackers.append(_Wandb(folder, config))
    if config.tensorboard:
        trackers.append(_TensorBoard(folder, start_step))
    return trackers


def curves(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Nested metrics as curves: `exit 4/top1`, `eval/full model/accepted`."""
    return dict(_flat(values, prefix))


def _flat(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}/")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for row in value:
                name = f"exit {row['exit']}" if "exit" in row else row["judge"]
                yield from _flat({k: v for k, v in row.items() if k != "exit"}, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{key}", float(value)


class _Wandb:
    def __init__(self, folder: Path, config: TrainConfig) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                "wandb.mode: wandb is not installed; run: pip install wandb, or give wandb.mode=disabled"
            ) from None
        try:
            self._run = wandb.init(
                project=config.wandb.project,
                name=folder.name,
                dir=folder,
                mode=config.wandb.mode,
                config=config.model_dump(mode="json"),
                id=folder.name,
                resume="allow",
                settings=wandb.Settings(silent=True),
            )
        except (wandb.Error, OSError) as error:
            raise ConfigError(
                f"wandb.mode={config.wandb.mode}: {first_line(error)}; offline needs neither login nor network"
            ) from None

    def log(self, step: int, curves: dict[str, float]) -> None:
        self._run.log(curves, step=step)

    def close(self) -> None:
        self._run.finish()


class _TensorBoard:
    def __init__(self, folder: Path, start_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                "tensorboard=true: tensorboard is not installed; run: pip install tensorboard, or leave it out"
            ) from None
        self._writer: Any = SummaryWriter(folder / "tensorboard", purge_step=start_step + 1)

    def log(self, step: int, curves: dict[str, float]) -> None:
        for name, value in curves.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
