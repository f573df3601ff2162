"""Ranks, however they are started: by hispec-train itself, deepspeed, torchrun, or a cluster's own launcher."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hispec.errors import ConfigError, FileError
from hispec.train import launch, ranks
from hispec.train.cli import run
from hispec.train.config import LaunchConfig

BIN = Path(sys.executable).parent
SCRIPT = "import sys; from hispec.train.cli import main; sys.exit(main())"
RUN = ["recipe=tiny", "train.max_steps=30", "train.save_every=500", "eval.max_prompts=1", "eval.max_new_tokens=8"]
STARTERS = [name for starter in ranks.STARTERS for name in starter]


def environment(folder: Path) -> dict[str, str]:
    """As a user's shell: no launcher's variables, whatever tests have run before."""
    kept = {name: value for name, value in os.environ.items() if name not in (*STARTERS, "MASTER_ADDR", "MASTER_PORT")}
    return kept | {"OMP_NUM_THREADS": "1", "PATH": f"{folder}:{BIN}:{os.environ['PATH']}"}


def begin(folder: Path, *command: str) -> subprocess.Popen[str]:
    """A command of a user, whose own processes end with it."""
    # Where tests run in the background of a shell, Ctrl-C is ignored, and so it would be there.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(
        [sys.executable, *command], env=environment(folder), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    """What it printed, once it has ended with `code`."""
    try:
        out = process.communicate(timeout=120)[0]
    finally:
        process.terminate()
    assert process.returncode == code, out
    return out


def wait_for(path: Path, process: subprocess.Popen[str], seconds: float = 60) -> None:
    """Until `path` is there, while `process` lives."""
    end = time.monotonic() + seconds
    while not path.is_file():
        assert process.poll() is None and time.monotonic() < end, "ended, or hangs"
        time.sleep(0.05)


def heads(run_dir: Path) -> bytes:
    return (run_dir / "heads" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_t16_every_way_to_start_two_ranks_gives_the_same_heads(tmp_path: Path) -> None:
    """Plain (interrupted, and gone on with), deepspeed with its --local_rank, and torchrun."""
    # More, as a machine may be slow to hand on a signal.
    steps = [*RUN, "train.max_steps=150"]
    script = tmp_path / "hispec-train"
    script.write_text(SCRIPT)
    plain = tmp_path / "plain"
    words = ["-m", "hispec.train.cli", *steps, "launch.ranks=2", f"run_dir={plain}"]
    first = begin(tmp_path, *words)
    wait_for(plain / "metrics.jsonl", first)
    first.send_signal(signal.SIGINT)
    out = finish(first, 130)
    assert out.count("stopped after step") == 1 and "the same command goes on from there" in out
    out = finish(begin(tmp_path, *words))
    assert "going on after step" in out and "ranks 2 = 2048" in out and out.count("heads exported") == 1

    out = finish(
        begin(
            tmp_path, "-m", "deepspeed.launcher.runner", "--num_accelerators=2", f"--master_port={ranks.free_port()}",
            str(script), *steps, f"run_dir={tmp_path / 'deepspeed'}",
        )
    )  # fmt: skip
    assert "--local_rank=1" in out and "ranks 2 = 2048" in out
    out = finish(
        begin(
            tmp_path, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={ranks.free_port()}",
            str(script), *steps, f"run_dir={tmp_path / 'torchrun'}",
        )
    )  # fmt: skip
    assert "ranks 2 = 2048" in out
    assert heads(plain) == heads(tmp_path / "deepspeed") == heads(tmp_path / "torchrun")


# Stands for ssh and for pdsh, which runs a command on several machines at once: all of them are this one.
SSH = "#!/bin/sh\necho 127.0.0.1\n"
PDSH = """#!{python}
import subprocess, sys
hosts = sys.argv[sys.argv.index("-w") + 1].split(",")
command = " ".join(sys.argv[sys.argv.index("-w") + 2 :])
running = [subprocess.Popen(command.replace("%n", str(n)), shell=True) for n, _ in enumerate(hosts)]
sys.exit(max(process.wait() for process in running))
"""


@pytest.mark.slow
def test_two_machines_by_hostfile_and_by_hand(tmp_path: Path) -> None:
    """Over (a stand-in for) ssh, and by the same command on each machine: the same heads."""
    for name, text in (("ssh", SSH), ("pdsh", PDSH.format(python=sys.executable))):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# two machines\nnode-a slots=1\nnode-b slots=1\n")
    words = ["-m", "hispec.train.cli", *RUN, f"launch.hostfile={hostfile}", "launch.master_addr=127.0.0.1"]
    by_ssh = [*words, f"launch.master_port={ranks.free_port()}", f"run_dir={tmp_path / 'ssh_run'}"]
    out = finish(begin(tmp_path, *by_ssh))
    assert "ranks 2 = 2048" in out and out.count("heads exported") == 1
    by_hand = [*words, f"launch.master_port={ranks.free_port()}", f"run_dir={tmp_path / 'hand_run'}"]
    machines = [begin(tmp_path, *by_hand, f"launch.node_rank={node}") for node in range(2)]
    outs = [finish(machine) for machine in machines]
    assert "ranks 2 = 2048" in outs[0] and "ranks" not in outs[1]
    assert heads(tmp_path / "ssh_run") == heads(tmp_path / "hand_run")


@pytest.mark.slow
def test_an_error_of_all_ranks_is_told_once(tmp_path: Path) -> None:
    words = [*RUN, "launch.ranks=2", "exits=[9]", f"run_dir={tmp_path / 'run'}"]
    out = finish(begin(tmp_path, "-m", "hispec.train.cli", *words), 2)
    assert out == "error: exits: 9 is out of range; legal exits of this model are 1..5 (it has 6 layers)\n"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),  # in sbatch's script, before srun
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "7"},
            ("3", "4", "1", "a", "7"),
        ),
        (
            {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "123456",
             "SLURM_STEP_NODELIST": "gpu[03-05,9]", "PMI_RANK": "3", "PMI_SIZE": "4"},
            ("3", "4", "1", "gpu03", "23456"),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
             "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            ("1", "2", "1", "127.0.0.1", "29500"),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MASTER_ADDR": "b"}, ("1", "2", "0", "b", "29500")),
    ],
)  # fmt: skip
def test_launchers_are_known_by_what_they_set(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: tuple[str, ...] | None
) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name in (*STARTERS, *names, "SLURM_STEP_NODELIST", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    for name in names:
        monkeypatch.setenv(name, os.environ.get(name, ""))  # so that what is written is taken back
        if name not in given:
            monkeypatch.delenv(name)
    assert ranks.adopt() == (expected is not None)
    if expected is not None:
        assert tuple(os.environ[name] for name in names) == expected


def test_ranks_that_cannot_meet_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*STARTERS, "MASTER_ADDR", "SLURM_STEP_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "0", "SIZE": "16", "LOCAL_RANK": "0", "LOCAL_SIZE": "8"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    with pytest.raises(ConfigError, match="16 ranks on several machines .* set MASTER_ADDR"):
        ranks.adopt()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lists no machines"),
        ("node-a\n", "hosts:1: 'node-a' cannot be used; each machine has one line `host slots=8`"),
        ("a slots=2\na slots=2\n", "hosts:2: 'a slots=2' cannot be used"),
        ("a slots=0\n", "hosts:1: 'a slots=0' cannot be used"),
        ("a slots=2 # first\n\nb slots=1\n", None),
    ],
)
def test_hostfiles(tmp_path: Path, text: str, message: str | None) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    if message is None:
        assert launch.read_hostfile(str(path)) == {"a": 2, "b": 1}
    else:
        with pytest.raises(ConfigError, match=message):
            launch.read_hostfile(str(path))


def test_what_cannot_be_launched_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in STARTERS:
        monkeypatch.delenv(name, raising=False)
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=1\n")
    tiny = ["recipe=tiny", f"run_dir={tmp_path / 'run'}"]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs pdsh; install it, or give the same command on every machine"):
        run([*tiny, f"launch.hostfile={hosts}"])
    with pytest.raises(ConfigError, match="launch.node_rank=1, but .*hosts lists 1 machines"):
        run([*tiny, f"launch.hostfile={hosts}", "launch.node_rank=1"])
    with pytest.raises(FileError, match="launch.hostfile 'nowhere' cannot be read"):
        run([*tiny, "launch.hostfile=nowhere"])
    with pytest.raises(ConfigError, match="node_rank and master_addr belong to a launch.hostfile"):
        run([*tiny, "launch.node_rank=1"])
    with pytest.raises(ConfigError, match="leave out launch.ranks"):
        run([*tiny, f"launch.hostfile={hosts}", "launch.ranks=2"])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ConfigError, match="launch.ranks=3, but a launcher started 2 ranks"):
        run([*tiny, "launch.ranks=3"])


def test_a_plan_tells_the_ranks_and_starts_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=8\nb slots=8\n")
    run(["recipe=tiny", "plan=true", f"launch.hostfile={hosts}", f"run_dir={tmp_path / 'run'}"])
    assert "micro batch 1024 x accumulation 1 x ranks 16 = 16384" in capsys.readouterr().out
    assert LaunchConfig().ranks is None and json.dumps(launch.planned(LaunchConfig(ranks=3))) == "3"
