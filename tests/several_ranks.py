"""Functions of tests run by several ranks: processes that meet over gloo, forked from one that has imported all."""

import contextlib
import io
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from hispec.train.ranks import free_port

Started = tuple[BaseProcess, Connection]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["hispec.train.loop", "train_fixtures"])


def start(function: Callable[..., Any], *arguments: Any, rank: int = 0, world: int = 1, port: int = 0) -> Started:
    """Run `function(*arguments)` as a rank, in a process of its own."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port or free_port()}
    environment = {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    process = CONTEXT.Process(target=_run, args=(theirs, environment, function, arguments))
    process.start()
    theirs.close()
    return process, ours


def in_ranks(world: int, function: Callable[..., Any], *arguments: Any, seconds: float = 120) -> list[Any]:
    """What `function(*arguments)` returns on each of `world` ranks; an error on one of them is raised here."""
    port = free_port()
    started = [start(function, *arguments, rank=rank, world=world, port=port) for rank in range(world)]
    with _ended([process for process, _ in started]):
        results = []
        for rank, (_, connection) in enumerate(started):
            assert connection.poll(seconds), f"rank {rank} of {world} hangs"
            fine, result = torch.load(io.BytesIO(connection.recv_bytes()), weights_only=False)
            assert fine, f"rank {rank} of {world}:\n{result}"
            results.append(result)
        for process, _ in started:
            process.join(seconds)
    return results


@contextlib.contextmanager
def _ended(processes: list[BaseProcess]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run(
    connection: Connection, environment: dict[str, str], function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    answer = io.BytesIO()
    try:
        torch.save((True, function(*arguments)), answer)
    except BaseException:
        torch.save((False, traceback.format_exc()), answer)
    connection.send_bytes(answer.getvalue())
