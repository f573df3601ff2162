"""DeepSpeed, and the only file that knows it: an engine that holds the heads, never the trunk.

What was learned leaves it whole and comes back whole, whatever ZeRO stage splits it over however many ranks: so a run
may go on with another number of them.

Letters: T tokens of a micro batch, S supervised positions, D hidden size.
"""

import contextlib
import importlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hispec.heads import Reading
from hispec.train import ranks
from hispec.train.ema import Ema
from hispec.train.muon import ADAMW, MUON, Muon, takes
from hispec.train.optim_config import OptimConfig
from hispec.train.student import Student

# Whoever imports DeepSpeed first (transformers may), it need not look for an accelerator, and say what it found.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")


class Engine:
    """Forward, backward and step of the heads on this rank."""

    def __init__(
        self,
        heads: nn.ModuleList,
        config: OptimConfig,
        accumulation: int,
        snapshot: Mapping[str, Tensor] | None = None,
        steps: int = 0,
    ) -> None:
        """Put the heads (float32) under DeepSpeed, together with the other ranks.

        `snapshot`: what to go on from after so many `steps`, on the first rank; the others take it from there.
        """
        ranks.join()
        deepspeed = load_deepspeed()
        self.stage = config.zero
        # One kernel for the whole update, where torch has one.
        self._fused = torch.cuda.is_available() and not config.offload
        offload = {"offload_optimizer": {"device": "cpu"}} if config.offload else {}
        settings = {
            "train_micro_batch_size_per_gpu": 1,  # one pack of documents
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": config.clip,
            "zero_optimization": {"stage": config.zero} | offload,
            # torch's own AdamW, in main memory too: DeepSpeed's needs a compiler.
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        }
        hyper: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "weight_decay": config.weight_decay}
        if config.optimizer == "adamw":
            params = hyper | {"torch_adam": True, "fused": self._fused or None}
            settings["optimizer"] = {"type": "AdamW", "params": params}
        self._trained = {name: parameter for name, parameter in heads.named_parameters() if parameter.requires_grad}
        self._shapes = {name: parameter.shape for name, parameter in self._trained.items()}
        self.n_parameters = sum(shape.numel() for shape in self._shapes.values())
        student, trainable = Student(heads), list(self._trained.values())
        own = Muon(self._trained, **hyper) if config.optimizer == "muon" else None
        # What the optimizer keeps of each, as torch calls it.
        self._averages = {name: MUON if own and takes(name, p) else ADAMW for name, p in self._trained.items()}
        if snapshot:
            for name, parameter in self._trained.items():
                parameter.data.copy_(snapshot[f"weight/{name}"])
        with quiet():
            # Here the first rank's weights become everyone's.
            self._engine: Any = deepspeed.initialize(
                model=student, model_parameters=trainable, optimizer=own, config=settings
            )[0]
        self._deepspeed = deepspeed
        if steps:
            self._restore_averages(snapshot or {}, steps)
        self._ema = None if config.ema is None else Ema(self._here(), config.ema, steps)
        if self._ema is not None and steps:
            for name, mean in self._ema.means.items():
                whole = self._from_first(snapshot or {}, f"ema/{name}", name)
                mean.copy_(self._part(whole) if self.stage == 3 else whole)

    def readings(
        self, hidden: dict[int, Tensor], ids_T: Tensor, positions_T: Tensor, rows_S: Tensor, lengths: Sequence[int]
    ) -> list[Reading]:
        """See `Student.forward`."""
        readings: list[Reading] = self._engine(hidden, ids_T, positions_T, rows_S, lengths)
        return readings

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this rank's share of a step's loss: shares of ranks and micro batches are summed."""
        # DeepSpeed means over ranks; a loss that is normalised over the whole step is to be summed.
        self._engine.backward(loss * ranks.world(), scale_wrt_gas=False)

    def step(self, lr: float) -> None:
        """After each micro batch; the last of a window updates the heads, at learning rate `lr`."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        last = self._engine.is_gradient_accumulation_boundary()
        self._engine.step()
        if last and self._ema is not None:
            self._ema.update()

    @property
    def optimized(self) -> list[Tensor]:
        """The tensors the optimizer updates; at ZeRO stages above 0 this rank's flat part of them."""
        zero = self._engine.optimizer
        match self.stage:
            case 0:
                return [p for group in zero.param_groups for p in group["params"]]
            case 3:
                return list(zero.fp32_partitioned_groups_flat)
            case _:
                return list(zero.single_partition_of_fp32_groups)

    def state(self) -> dict[str, Tensor]:
        """A copy of all tensors of the heads, whole, on every rank, under the names they are exported with; of their
        running means, where these are kept."""
        heads = self._engine.module.heads
        with self._exported(), self._whole(list(heads.parameters())):
            return {name: value.detach().clone() for name, value in heads.state_dict().items()}

    def snapshot(self) -> dict[str, Tensor]:
        """All that training has made, whole, in the first rank's main memory (elsewhere empty): the heads' trained
        tensors as `weight/NAME`, their running means as `ema/NAME`, the optimizer's averages as `exp_avg/NAME`..."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._trained.items():
            # One parameter at a time: all of them whole may not fit beside the trunk.
            with self._whole([parameter]):
                kept = {f"weight/{name}": parameter.detach().to("cpu", copy=True)}
            if self._ema is not None:
                with self._exported(), self._whole([parameter]):
                    kept[f"ema/{name}"] = parameter.detach().to("cpu", copy=True)
            kept |= {f"{average}/{name}": self._average(parameter, average).cpu() for average in self._averages[name]}
            if ranks.rank() == 0:
                found |= kept
        return found

    def _restore_averages(self, snapshot: Mapping[str, Tensor], steps: int) -> None:
        """Take over the averages of the first rank's `snapshot`, made after so many `steps`."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._trained.items()}
        for flat in self.optimized:
            made = {average: torch.zeros_like(flat) for average in self._averages.get(names.get(flat, ""), ADAMW)}
            step = torch.tensor(float(steps), device=flat.device if self._fused else "cpu")
            self._inner.state[flat] = {"step": step, **made}
        if self.stage in (1, 2):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()
        for name, parameter in self._trained.items():
            for average in self._averages[name]:
                self._set_average(parameter, average, self._from_first(snapshot, f"{average}/{name}", name))

    def _from_first(self, snapshot: Mapping[str, Tensor], key: str, name: str) -> Tensor:
        """A tensor of the first rank's snapshot, on every rank."""
        whole = torch.empty(self._shapes[name], device=self._engine.device)
        if ranks.rank() == 0:
            whole.copy_(snapshot[key])
        dist.broadcast(whole, 0)
        return whole

    def _average(self, parameter: Tensor, average: str) -> Tensor:
        if self.stage == 0:
            kept: Tensor = self._inner.state[parameter][average]
            return kept
        whole: Tensor = self._deepspeed.utils.safe_get_full_optimizer_state(parameter, average)
        return whole

    def _set_average(self, parameter: Tensor, average: str, whole: Tensor) -> None:
        match self.stage:
            case 0:
                self._inner.state[parameter][average].copy_(whole)
            case 3:
                self._deepspeed.utils.safe_set_local_optimizer_state(parameter, self._part(whole), average)
            case _:
                self._deepspeed.utils.safe_set_full_optimizer_state(parameter, whole, average)

    def _part(self, whole: Tensor) -> Tensor:
        """This rank's part under ZeRO-3: each has an equal one, the last one's filled up."""
        size = -(-whole.numel() // ranks.world())
        padded = torch.nn.functional.pad(whole.flatten(), (0, size * ranks.world() - whole.numel()))
        return padded[size * ranks.rank() :][:size]

    def _here(self) -> dict[str, Tensor]:
        """What this rank holds of the trained tensors."""
        return {name: getattr(p, "ds_tensor", p).data for name, p in self._trained.items()}

    def _exported(self) -> contextlib.AbstractContextManager[None]:
        """While entered, the trained tensors are what an export is to hold."""
        return contextlib.nullcontext() if self._ema is None else self._ema.in_place()

    @property
    def _inner(self) -> Any:
        """torch's optimizer, inside DeepSpeed's or alone."""
        return self._engine.optimizer if self.stage == 0 else self._engine.optimizer.optimizer

    def _whole(self, parameters: list[nn.Parameter]) -> contextlib.AbstractContextManager[None]:
        gathered: contextlib.AbstractContextManager[None] = self._deepspeed.zero.GatheredParameters(parameters)
        return gathered


def load_deepspeed() -> Any:
    """The library, made to start at once and in silence."""
    with quiet():
        # By name: it has no types.
        deepspeed: Any = importlib.import_module("deepspeed")

    # Its first start on a CPU would compile this for minutes, and a killed build blocks every later run.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # It calls collectives by names that torch is about to rename; that concerns neither us nor the user.
    for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
        warnings.filterwarnings("ignore", message=f".*{name}.* is deprecated", category=FutureWarning)
    return deepspeed


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What DeepSpeed says at start-up is said to its developers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
