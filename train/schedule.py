"""The learning rate over a run.

    cosine   /``-._        linear   /``-.__       constant  /------       wsd   /-----.
            /      `-                      ``--            /                   /       \\
"""

import math

from hispec.train.optim_config import OptimConfig


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Of the step after `step`: a linear rise from 0, then what the schedule says, down to `final_lr` of the peak."""
    warmup = round(config.warmup * steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    left = max(1, steps - 1 - warmup)
    done = min(1.0, (step - warmup) / left)
    match config.schedule:
        case "cosine":
            height = 0.5 * (1 + math.cos(math.pi * done))
        case "linear":
            height = 1.0 - done
        case "constant":
            height = 1.0
        case "wsd":
            height = min(1.0, (1.0 - done) / config.cooldown)
    return config.lr * (config.final_lr + (1 - config.final_lr) * height)
