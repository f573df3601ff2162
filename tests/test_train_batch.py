"""T08: micro batch, accumulation, ranks and global batch, from what is given of them."""

from pathlib import Path
from typing import Any

import pytest
from train_fixtures import config, model_folder

from hispec.errors import ConfigError
from hispec.train.batch import solve
from hispec.train.cli import load, run
from hispec.train.optim_config import OptimConfig
from hispec.train.setup import prepare

BATCH = ("micro_batch_tokens", "accumulation", "global_batch_tokens")


def given(*numbers: int | None) -> OptimConfig:
    """Micro batch, accumulation and global batch."""
    return OptimConfig.build(dict(zip(BATCH, numbers, strict=True)))


@pytest.mark.parametrize(
    ("numbers", "world", "micro", "accumulation", "total"),
    [
        ((None, None, None), 1, 2048, 1, 2048),
        ((512, None, None), 3, 512, 1, 1536),
        ((None, 4, None), 2, 2048, 4, 16384),
        ((512, 4, None), 2, 512, 4, 4096),
        ((512, None, 4096), 2, 512, 4, 4096),
        ((512, None, 4096), 1, 512, 8, 4096),
        ((None, 4, 4096), 2, 512, 4, 4096),
        ((None, None, 8192), 2, 2048, 2, 8192),
        ((None, None, 1000), 2, 500, 1, 1000),
        ((512, 4, 4096), 2, 512, 4, 4096),
    ],
)
def test_t08_two_numbers_give_the_third(
    numbers: tuple[int | None, ...], world: int, micro: int, accumulation: int, total: int
) -> None:
    triple = solve(given(*numbers), world)
    assert (triple.micro, triple.accumulation, triple.world, triple.total) == (micro, accumulation, world, total)
    assert str(triple) == f"micro batch {micro} x accumulation {accumulation} x ranks {world} = {total}"


@pytest.mark.parametrize(
    ("numbers", "world", "message"),
    [
        ((512, 4, 4096), 1, r"global_batch_tokens=4096 is not micro_batch_tokens=512 and accumulation=4 on 1 ranks"),
        ((512, None, 4096), 3, r"global_batch_tokens=4096 is not micro_batch_tokens=512 on 3 ranks .* = 3072"),
        ((None, 3, 4096), 1, r"global_batch_tokens=4096 is not accumulation=3 on 1 ranks .* = 4095"),
        ((512, None, 256), 1, r"global_batch_tokens=256 is not micro_batch_tokens=512 on 1 ranks"),
        ((None, 8, 4), 1, r"global_batch_tokens=4 is not accumulation=8 on 1 ranks"),
        ((None, None, 5000), 1, r"global_batch_tokens=5000 is not a multiple of 2048 on 1 ranks"),
    ],
)
def test_t08_contradictions_are_one_line(numbers: tuple[int | None, ...], world: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        solve(given(*numbers), world)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_t08_every_recipe_has_a_batch_on_any_number_of_ranks(world: int, capsys: pytest.CaptureFixture[str]) -> None:
    run(["recipes"])
    for line in capsys.readouterr().out.splitlines():
        triple = solve(load([f"recipe={line.split()[0]}"]).train, world)
        assert triple.total == triple.micro * triple.accumulation * world


def test_t08_a_document_must_fit_a_micro_batch(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"data__max_len": 64, "train__micro_batch_tokens": 63}
    with pytest.raises(ConfigError, match="data.max_len=64 does not fit a micro batch of 63 tokens"):
        prepare(config(tmp_path, model_folder(tmp_path, "llama_gqa"), **changes))
