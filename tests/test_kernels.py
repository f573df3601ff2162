"""The Triton kernels against a dense reference, under Triton's interpreter; and compiled for a GPU without one.

The interpreter has no bf16 product (it would multiply the bit patterns), so fp16 stands for the short types here; bf16
runs in tests/gpu. Triton decides when it is imported whether it interprets: hence a process of its own for either.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytest.importorskip("triton")


def run(script: str, interpret: bool) -> str:
    """What one of the scripts beside this file prints."""
    environment = os.environ | {"TRITON_INTERPRET": str(int(interpret)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def interpreted() -> str:
    return run("kernel_checks.py", interpret=True)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["heads", "sizes", "edges", "windows", "splits", "padding", "offsets", "write"])
def test_kernels_equal_the_dense_reference(interpreted: str, what: str) -> None:
    assert f"{what}: as wanted" in interpreted, interpreted[-4000:]


@pytest.fixture(scope="module")
def decoded() -> str:
    return run("kernel_decoding.py", interpret=True)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["engine", "graphs", "drafts"])
def test_decoding_through_the_kernels_equals_the_cpu_path(decoded: str, what: str) -> None:
    assert f"{what}: as wanted" in decoded, decoded[-4000:]


@pytest.mark.slow
def test_every_kernel_compiles_for_sm_90() -> None:
    out = run("kernel_compile.py", interpret=False)
    assert "compiled: as wanted" in out, out[-4000:]
