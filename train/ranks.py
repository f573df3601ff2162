"""Which of how many ranks this process is, and what the ranks tell each other.

A rank is one process with one GPU (or with the CPU). Ranks are started by `launch.py`, or by whoever the cluster uses.
"""

import os
import re
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hispec.errors import ConfigError

# What those who start processes call its rank, the number of ranks, its place on its machine, and the ranks there.
STARTERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # deepspeed, torchrun, and hispec-train itself
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
)
# The others wait while the first rank tokenises or lets the trunk write answers; a dead rank is the launcher's matter.
PATIENCE = timedelta(days=1)


def adopt() -> bool:
    """Whether a launcher started this process; what it says about ranks is written under torchrun's names.

    Raises:
        ConfigError: it does not say where the ranks are to meet.
    """
    for rank_name, world_name, local_name, local_world_name in STARTERS:
        n_ranks = int(os.environ.get(world_name) or 1)
        if rank_name not in os.environ or (rank_name != "RANK" and n_ranks == 1):
            continue
        place = {"RANK": os.environ[rank_name], "WORLD_SIZE": str(n_ranks)}
        place["LOCAL_RANK"] = os.environ.get(local_name) or "0"
        if "MASTER_ADDR" not in os.environ:
            place["MASTER_ADDR"] = _meeting_place(n_ranks, os.environ.get(local_world_name))
        # Jobs that share a machine must not meet at one port.
        port = 20000 + int(os.environ.get("SLURM_JOB_ID") or 9500) % 20000
        os.environ.update(place)
        os.environ.setdefault("MASTER_PORT", str(port))
        return True
    return False


def _meeting_place(n_ranks: int, here: str | None) -> str:
    if nodes := os.environ.get("SLURM_STEP_NODELIST"):
        return first_host(nodes)
    if here == str(n_ranks) or n_ranks == 1:
        return "127.0.0.1"
    raise ConfigError(
        f"{n_ranks} ranks on several machines do not know where to meet; set MASTER_ADDR to the address of the first,"
        " such as mpirun -x MASTER_ADDR=node1"
    )


def first_host(nodes: str) -> str:
    """The first of SLURM's list of machines: `gpu[03-05,9],login` is `gpu03`."""
    found = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    assert found, nodes
    return found[1] + (found[2] or "")


def rank() -> int:
    """This process's number among all ranks, known before they have met."""
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    """How many ranks there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def device() -> str:
    """Where this rank computes."""
    if not torch.cuda.is_available():
        return "cpu"
    # Some launchers show each rank its own GPU only.
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"


def join() -> None:
    """Meet the other ranks, or be the only one. NCCL carries what lies on GPUs, gloo what lies in main memory."""
    if dist.is_initialized():
        return
    if "RANK" not in os.environ:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(alone | {"MASTER_PORT": str(free_port())})
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device())
        os.environ["LOCAL_RANK"] = device().removeprefix("cuda:")
    dist.init_process_group(backend, timeout=PATIENCE)


def leave() -> None:
    """Say goodbye to the other ranks, at the very end."""
    if dist.is_initialized():
        dist.destroy_process_group()


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def meet() -> None:
    """Wait until every rank is here; alone, go on."""
    largest(0)


def largest(value: int) -> int:
    """The largest `value` of all ranks."""
    if world() == 1:
        return value
    join()
    shared = torch.tensor(value)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return int(shared)


def sum_over(values: Tensor) -> Tensor:
    """Sum of `values` over all ranks, in place."""
    if world() > 1:
        join()
        dist.all_reduce(values)
    return values


def from_first(value: Any) -> Any:
    """The first rank's `value`, on every rank."""
    if world() == 1:
        return value
    join()
    shared = [value]
    dist.broadcast_object_list(shared, device=torch.device("cpu"))
    return shared[0]
