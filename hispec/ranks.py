"""Processes that decode as one: each holds a part of every layer, all take the same decisions.

Nothing is sent to agree on a token: every rank has the whole logits, and the noise of sampling is a function of seed
and position. What only one rank can know, the words of a user or a seed that is drawn, the first tells the others.
"""

import atexit
import contextlib
import logging
import os
import random
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class _Joined:
    """What this process has agreed on with the others."""

    seeds: random.Random | None = None


def count() -> int:
    """Processes that a launcher (torchrun) started together with this one; 1 without a launcher."""
    launched = "RANK" in os.environ and "MASTER_ADDR" in os.environ
    return int(os.environ.get("WORLD_SIZE", "1")) if launched else 1


def is_first() -> bool:
    """Whether this process speaks to the user and writes the files."""
    return int(os.environ.get("RANK", "0")) == 0


def joined() -> bool:
    """Whether this process decodes as one with others."""
    return _Joined.seeds is not None


def join() -> None:
    """Meet the other ranks; from here on they are one decoder. Does nothing when already met, or alone."""
    if count() == 1 or joined():
        return
    import torch

    distributed: Any = torch.distributed
    if not distributed.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # Small talk goes over gloo even where tensors go over NCCL.
        distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        atexit.register(distributed.destroy_process_group)
    _Joined.seeds = random.Random(share(secrets.randbits(62)))


def share(value: Any) -> Any:
    """The first rank's `value`, on every rank; alone, one's own."""
    if count() == 1:
        return value
    import torch

    box = [value]
    torch.distributed.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


@contextlib.contextmanager
def first_speaks() -> Iterator[None]:
    """Within, only the first rank writes to stdout, and warns."""
    if is_first():
        yield
        return
    logging.getLogger("hispec").setLevel(logging.ERROR)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def fresh_seed() -> int:
    """A seed for a request that has none; the same on all ranks that have joined."""
    return (_Joined.seeds or secrets.SystemRandom()).getrandbits(62)


def whole(tensor: "Tensor") -> "Tensor":
    """The tensor itself, or what a sharded one is a part of; then all ranks must ask."""
    gather = getattr(tensor, "full_tensor", None)
    result: Tensor = tensor if gather is None else gather()
    return result
