"""Starting ranks through DeepSpeed's launcher: one per GPU of this machine, or of every machine in a hostfile.

    hispec-train (the command)  ->  deepspeed.launcher  ->  hispec-train (rank 0), hispec-train (rank 1), ...

The command waits, passes signals on and ends with the ranks' exit code.
"""

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import psutil  # type: ignore[import-untyped]

from hispec.errors import ConfigError, FileError
from hispec.train.config import LaunchConfig
from hispec.train.ranks import free_port, world

# Where ranks of several machines meet, as everywhere.
PORT = 29500
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Quiet, because what it has to say about a rank that failed, the rank has said.
LAUNCHER = ("--log_level=critical", "--module", "--no_local_rank", "hispec.train.cli")


def needed(config: LaunchConfig) -> bool:
    """Whether this process is to start ranks, as no launcher has started it.

    Raises:
        ConfigError: more ranks than GPUs.
    """
    return config.hostfile is not None or len(_devices(config)) > 1


def planned(config: LaunchConfig) -> int:
    """How many ranks a run would have. Raises as `start`."""
    if world() > 1 or config.hostfile is None:
        return max(world(), len(_devices(config)))
    return sum(read_hostfile(config.hostfile).values())


def check(config: LaunchConfig) -> None:
    """Refuse settings that contradict the launcher which has started this rank. Raises ConfigError."""
    if config.hostfile is None and config.ranks not in (None, world()):
        raise ConfigError(
            f"launch.ranks={config.ranks}, but a launcher started {world()} ranks;"
            " leave launch.ranks out under a launcher"
        )


def start(config: LaunchConfig, words: Sequence[str]) -> int:
    """Start the ranks, each with the command's own `words`, and wait for them. Returns the exit code.

    Raises:
        ConfigError, FileError: the hostfile cannot be used.
    """
    over_ssh = config.hostfile is not None and config.node_rank is None
    launcher = _over_ssh(config) if over_ssh else _on_this_machine(config)
    environment = os.environ | _environment(config)
    # In a session of its own, so that Ctrl-C reaches the ranks once, through us, and not again from the terminal.
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", *launcher, *LAUNCHER, *words], env=environment, start_new_session=True
    )
    return _wait(process, over_ssh)


def read_hostfile(path: str) -> dict[str, int]:
    """Machines and how many ranks each gets: lines `host slots=8`, `#` starts a comment.

    Raises:
        FileError: not readable. ConfigError: a line that means something else.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise FileError(f"launch.hostfile {path!r} cannot be read: {error.strerror}") from None
    hosts: dict[str, int] = {}
    for number, line in enumerate((line.partition("#")[0].strip() for line in lines), 1):
        found = re.fullmatch(r"(\S+)\s+slots=([1-9]\d*)", line)
        if line and (found is None or found[1] in hosts):
            raise ConfigError(f"{path}:{number}: {line!r} cannot be used; each machine has one line `host slots=8`")
        if found:
            hosts[found[1]] = int(found[2])
    if not hosts:
        raise ConfigError(f"{path} lists no machines; give one line `host slots=8` for each")
    return hosts


def _devices(config: LaunchConfig) -> list[str]:
    """The GPUs of this machine that ranks are to use, among those the user lets us see; on a CPU, numbers."""
    import torch

    if not torch.cuda.is_available():
        return [str(number) for number in range(config.ranks or 1)]
    n_devices = torch.cuda.device_count()
    shown = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    devices = shown[:n_devices] or [str(number) for number in range(n_devices)]
    if (config.ranks or 1) > n_devices:
        raise ConfigError(f"launch.ranks={config.ranks}, but this machine has {n_devices} GPUs; give at most as many")
    return devices[: config.ranks]


def _on_this_machine(config: LaunchConfig) -> list[str]:
    if config.hostfile is None:
        ranks, node, address, port = {"localhost": _devices(config)}, 0, "127.0.0.1", config.master_port or free_port()
    else:
        hosts = read_hostfile(config.hostfile)
        node = config.node_rank or 0
        if node >= len(hosts):
            raise ConfigError(
                f"launch.node_rank={node}, but {config.hostfile} lists {len(hosts)} machines;"
                " give the place of this one, from 0"
            )
        ranks = {host: [str(slot) for slot in range(n)] for host, n in hosts.items()}
        address, port = config.master_addr or next(iter(hosts)), config.master_port or PORT
    world_info = base64.urlsafe_b64encode(json.dumps(ranks).encode()).decode()
    places = [f"--world_info={world_info}", f"--node_rank={node}", f"--master_addr={address}", f"--master_port={port}"]
    return ["deepspeed.launcher.launch", *places]


def _over_ssh(config: LaunchConfig) -> list[str]:
    assert config.hostfile is not None
    read_hostfile(config.hostfile)
    if shutil.which("pdsh") is None:
        raise ConfigError(
            "launch.hostfile: starting ranks on other machines needs pdsh; install it, or give the same command on"
            " every machine with launch.node_rank=0, 1, ..."
        )
    address = [] if config.master_addr is None else [f"--master_addr={config.master_addr}"]
    places = [f"--hostfile={config.hostfile}", *address, f"--master_port={config.master_port or PORT}"]
    return ["deepspeed.launcher.runner", *places]


def _environment(config: LaunchConfig) -> dict[str, str]:
    import torch

    accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    added = {"DS_ACCELERATOR": accelerator}
    if "OMP_NUM_THREADS" not in os.environ:
        # Ranks share the cores: each with a thread on every core would only be in the others' way.
        added["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // len(_devices(config))))
    return added


def _wait(process: subprocess.Popen[bytes], over_ssh: bool) -> int:
    """The launcher's exit code; the first signal goes to the ranks, which save and stop, a second one ends them."""
    told = False

    def tell(number: int, frame: FrameType | None) -> None:
        nonlocal told
        # The launcher gives its ranks half a minute, a step may take longer; on other machines, only it reaches them.
        receivers = [process] if over_ssh else psutil.Process(process.pid).children(recursive=True)
        if told or not receivers:
            os.killpg(process.pid, signal.SIGKILL)
        told = True
        for receiver in receivers:
            receiver.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    # A closed terminal is no reason to stop for who has started us with nohup.
    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, tell) for number in heard}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
