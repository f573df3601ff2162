"""What all tests share."""

import torch

# Tiny models: a second thread costs more than it brings, and tests may run beside each other.
torch.set_num_threads(1)
