"""DeepSpeed, and the only file that knows it: an engine that holds the heads, never the trunk."""

import contextlib
import importlib
import logging
import os
import socket
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hispec.attention import PackedAttention
from hispec.errors import CheckpointError, FileError, first_line
from hispec.heads import Head
from hispec.train.config import OptimConfig

# Whoever imports DeepSpeed first (transformers may), it need not look for an accelerator, and say what it found.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")


class Student(nn.Module):
    """All heads as one module, so that one engine holds them."""

    def __init__(self, heads: nn.ModuleList) -> None:
        super().__init__()
        self.heads = heads

    def forward(
        self, hidden: dict[int, Tensor], ids_T: Tensor, positions_T: Tensor, rows_S: Tensor, lengths: Sequence[int]
    ) -> list[Tensor]:
        """Features [S, D] of each head at the positions `rows_S`, from the hidden states [T, D] at the exits."""
        attend = PackedAttention(lengths)
        features = []
        for head in self.heads:
            assert isinstance(head, Head)
            hidden_TD = hidden[head.exit]
            if head.placed:
                features.append(head.features(hidden_TD, ids_T, positions_T, attend)[rows_S])
            else:
                features.append(head.features(hidden_TD[rows_S], ids_T, positions_T, attend))
        return features


class Engine:
    """Forward, backward and step of the heads on this rank; checkpoints of heads and optimizer."""

    def __init__(self, heads: nn.ModuleList, config: OptimConfig) -> None:
        """Join the launcher's ranks, or be the only one, and put the heads (float32) under DeepSpeed."""
        deepspeed = _deepspeed()
        _join(deepspeed)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        settings = {
            "train_micro_batch_size_per_gpu": 1,  # one pack of documents
            "gradient_accumulation_steps": config.accumulation,
            "gradient_clipping": config.clip,
            "zero_optimization": {"stage": config.zero},
            "optimizer": {
                "type": "AdamW",
                # torch's own AdamW: DeepSpeed's needs a compiler.
                "params": {
                    "lr": config.lr,
                    "betas": config.betas,
                    "weight_decay": config.weight_decay,
                    "torch_adam": True,
                },
            },
            "steps_per_print": 10**9,
        }
        student = Student(heads)
        with _quiet():
            trainable = [p for p in student.parameters() if p.requires_grad]
            self.n_parameters = sum(p.numel() for p in trainable)
            self._engine: Any = deepspeed.initialize(model=student, model_parameters=trainable, config=settings)[0]
        self._gathered = deepspeed.zero.GatheredParameters

    def features(
        self, hidden: dict[int, Tensor], ids_T: Tensor, positions_T: Tensor, rows_S: Tensor, lengths: Sequence[int]
    ) -> list[Tensor]:
        """See `Student.forward`."""
        features: list[Tensor] = self._engine(hidden, ids_T, positions_T, rows_S, lengths)
        return features

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this rank's share of a step's loss: shares of ranks and micro batches are summed."""
        # DeepSpeed means over ranks; a loss that is normalised over the whole step is to be summed.
        self._engine.backward(loss * self.world, scale_wrt_gas=False)

    def step(self, lr: float) -> None:
        """After each micro batch; the last of a window updates the heads, at learning rate `lr`."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        self._engine.step()

    @property
    def optimized(self) -> list[Tensor]:
        """The tensors the optimizer updates."""
        return [p for group in self._engine.optimizer.param_groups for p in group["params"]]

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Sum of `values` over all ranks."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def largest(self, value: int) -> int:
        """The largest `value` of all ranks."""
        if self.world == 1:
            return value
        shared = torch.tensor(value, device=self._engine.device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return int(shared)

    def state(self) -> dict[str, Tensor]:
        """A copy of all tensors of the heads, whole, on every rank, under the names they are exported with."""
        heads = self._engine.module.heads
        with self._gathered(list(heads.parameters())):
            return {name: value.detach().clone() for name, value in heads.state_dict().items()}

    def save(self, folder: Path, tag: str) -> None:
        """Write heads and optimizer to folder/tag.

        Raises:
            FileError: the place cannot be written.
        """
        try:
            with _quiet():
                self._engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
        except (OSError, RuntimeError) as error:
            raise FileError(
                f"cannot write checkpoint {folder / tag}: {error}; free space or choose another run_dir"
            ) from None

    def load(self, folder: Path, tag: str) -> None:
        """Read heads and optimizer from folder/tag.

        Raises:
            CheckpointError: it does not fit, or is damaged.
        """
        try:
            with _quiet():
                path, _ = self._engine.load_checkpoint(str(folder), tag=tag)
        except (OSError, RuntimeError, KeyError, ValueError, EOFError) as error:
            raise CheckpointError(
                f"checkpoint {folder / tag} cannot be read ({first_line(error)}); remove it, or give resume=never"
            ) from None
        if path is None:
            raise CheckpointError(f"checkpoint {folder / tag} is incomplete; remove it, or give resume=never")


def rank() -> int:
    """This process's rank, known before any engine is made."""
    return int(os.environ.get("RANK", "0"))


def meet() -> None:
    """Wait until every rank is here; alone, go on."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _join(_deepspeed())
        dist.barrier()


def _deepspeed() -> Any:
    with _quiet():
        # By name: it has no types.
        deepspeed: Any = importlib.import_module("deepspeed")

    # Its first start on a CPU would compile this for minutes, and a killed build blocks every later run.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # It calls collectives by names that torch is about to rename; that concerns neither us nor the user.
    for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
        warnings.filterwarnings("ignore", message=f".*{name}.* is deprecated", category=FutureWarning)
    return deepspeed


def _join(deepspeed: Any) -> None:
    if dist.is_initialized():
        return
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        alone = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        os.environ.update(alone)
    with _quiet():
        deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo", verbose=False)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What DeepSpeed says at start-up is said to its developers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
