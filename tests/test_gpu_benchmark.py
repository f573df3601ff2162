"""benchmarks/gpu.py, as far as a machine without a GPU goes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hispec.config import parse_assignments
from hispec.decode.options import DecodeOptions
from hispec.errors import ConfigError

ROOT = Path(__file__).parents[1]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_dry_run_says_what_would_run() -> None:
    done = bench("--dry-run")
    assert done.returncode == 0, done.stderr
    for said in ("llama-2-7b: weights 13.48 GB", "llama-3-8b: weights 16.06 GB", "a step reads", "tests/gpu"):
        assert said in done.stdout


def test_tiny_shapes_run_all_of_it_and_forced_acceptance_is_labelled(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    done = bench(*"--tiny --device cpu --models tiny-gqa --batch 1 3 --tokens 24 --output".split(), str(out))
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())["tiny-gqa"]
    assert set(result) == {"plain", "levels", "SYNTHETIC"} and len(result["levels"]) == 3 * 2 * 4
    for row in result["SYNTHETIC"]:
        assert all(0.3 < share <= 1.0 for share in row["acceptance"])
    lines = [line for line in done.stdout.splitlines() if "acceptance" in line]
    assert lines and all("SYNTHETIC" in line and "not a model's output" in line for line in lines)


def test_acceptance_without_its_label_is_refused() -> None:
    done = bench("--acceptance", "0.8,0.9")
    assert done.returncode == 2 and "write synthetic:A,B" in done.stderr.splitlines()[-1]


def test_forced_acceptance_is_out_of_reach_for_those_who_decode() -> None:
    with pytest.raises(ConfigError, match="acceptance"):
        parse_assignments(["acceptance=synthetic:0.8,0.9"], DecodeOptions)
    for room in ("hispec", "decode", "train", "recipes"):
        for path in (ROOT / room).glob("*.py"):
            assert "synthetic" not in path.read_text().lower(), path
