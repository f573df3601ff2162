"""What all tests share."""

from collections.abc import Iterator

import pytest
import torch

# Tiny models: a second thread costs more than it brings, and tests may run beside each other.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def keep_torchs_own_linear() -> Iterator[None]:
    """DeepSpeed's ZeRO-3 replaces F.linear for the rest of the process, with one that rounds otherwise in bf16."""
    before = torch.nn.functional.linear
    yield
    torch.nn.functional.linear = before
