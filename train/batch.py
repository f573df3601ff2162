"""How many tokens a step has: micro batch x accumulation x ranks = global batch, solved from what is given."""

from typing import NamedTuple

from hispec.errors import ConfigError
from hispec.train.optim_config import OptimConfig

MICRO_BATCH = 2048


class BatchTriple(NamedTuple):
    """Tokens of a micro batch, micro batches of a step on each rank, and ranks."""

    micro: int
    accumulation: int
    world: int

    @property
    def total(self) -> int:
        """Tokens of a step, on all ranks."""
        return self.micro * self.accumulation * self.world

    def __str__(self) -> str:
        return f"micro batch {self.micro} x accumulation {self.accumulation} x ranks {self.world} = {self.total}"


def solve(config: OptimConfig, world: int) -> BatchTriple:
    """The triple that `config` stands for on `world` ranks.

    Raises:
        ConfigError: no whole numbers satisfy what is given.
    """
    micro, accumulation, total = config.micro_batch_tokens, config.accumulation, config.global_batch_tokens
    if total is not None:
        if accumulation is None:
            micro = micro or min(MICRO_BATCH, total // world)
            accumulation = total // (max(micro, 1) * world)
        micro = micro or total // (accumulation * world)
    triple = BatchTriple(micro or MICRO_BATCH, accumulation or 1, world)
    if total is not None and (triple.total != total or accumulation == 0 or micro == 0):
        given = {"micro_batch_tokens": config.micro_batch_tokens, "accumulation": config.accumulation}
        fixed = " and ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        raise ConfigError(
            f"train.global_batch_tokens={total} is not {fixed or f'a multiple of {triple.micro}'} on {world} ranks"
            f" ({triple}); change one of the numbers, or leave one out"
        )
    return triple
