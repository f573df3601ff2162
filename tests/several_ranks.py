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
    """What `function(*arguments)` returns on each of `world` ranks.

    Errors of all of them are raised here together: what the first one says may only be that another one has gone.
    """
    port = free_port()
    started = [start(function, *arguments, rank=rank, world=world, port=port) for rank in range(world)]
    with _ended([process for process, _ in started]):
        results: list[Any] = []
        errors: list[str] = []
        for rank, (process, connection) in enumerate(started):
            assert connection.poll(seconds), "\n".join([*errors, f"rank {rank} of {world} hangs"])
            try:
                fine, result = torch.load(io.BytesIO(connection.recv_bytes()), weights_only=False)
            except EOFError:
                process.join(seconds)
                fine, result = False, f"it has ended with exit code {process.exitcode}"
            (results if fine else errors).append(result if fine else f"rank {rank} of {world}:\n{result}")
        assert not errors, "\n".join(errors)
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
