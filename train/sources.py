"""Where rows come from: files and folders, or data sets of the Hub. The only file that knows `datasets`."""

import importlib
import itertools
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hispec.errors import ConfigError, FileError, first_line
from hispec.train.data_config import SourceConfig
from hispec.train.rows import JSON, PARQUET, TEXT, Row, find_files, read_file, row_of

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def rows_of(sources: Sequence[SourceConfig], seed: int) -> Iterator[Row]:
    """All rows of all sources, in an order that never changes; a row may come several times, see `weight`.

    Raises:
        FileError, DataError, ConfigError: nothing there, or not readable.
    """
    for number, source in enumerate(sources):
        rows = itertools.islice(_rows(source), source.rows)
        yield from rows if source.weight == 1.0 else _weighted(rows, source.weight, f"{seed} {number}")


def check(sources: Sequence[SourceConfig]) -> None:
    """Whether every source is there, as far as that is known without reading it.

    Raises:
        FileError: neither file nor folder, and no Hub id either.
    """
    for source in sources:
        if not find_files(source.path) and not is_hub(source.path):
            raise FileError(
                f"data.source: {source.path!r} matches no file; give a file, glob, folder or Hub id (org/name)"
            )


def is_hub(path: str) -> bool:
    """Whether `path` names a data set of the Hub: there is no such file here, and it could not be meant as one."""
    known_type = Path(path).suffix in (*JSON, *TEXT, PARQUET)
    return HUB_ID.fullmatch(path) is not None and not path.startswith(".") and not known_type and not find_files(path)


def stamp(source: SourceConfig) -> list[Any]:
    """What tells whether a source still holds what it held."""
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in find_files(source.path)]
    return [source.model_dump(mode="json"), files]


def _rows(source: SourceConfig) -> Iterator[Row]:
    if is_hub(source.path):
        yield from dataset_rows(source)
        return
    check([source])
    for path in find_files(source.path):
        yield from read_file(path)


def dataset_rows(source: SourceConfig) -> Iterator[Row]:
    """Rows of a data set that `datasets` loads: a Hub id, or a folder laid out as one.

    Raises:
        ConfigError: `datasets` is not installed. FileError: not found, or not delivered.
    """
    try:
        # By name: reading local files needs none of it.
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise ConfigError(f"data.source: {source.path!r} needs datasets; run: pip install 'hispec[train]'") from None
    try:
        found = datasets.load_dataset(
            source.path, source.name, split=source.split, revision=source.revision, streaming=source.streaming
        )
        for number, item in enumerate(found, 1):
            yield row_of(item, f"{source.path} ({source.split}), row {number}")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise FileError(f"data.source: {source.path!r} cannot be read: {first_line(error)}") from None


def _weighted(rows: Iterator[Row], weight: float, seed: str) -> Iterator[Row]:
    """Each row `weight` times; the part behind the point by chance, which `seed` decides."""
    rng = random.Random(seed)
    for row in rows:
        yield from itertools.repeat(row, int(weight) + (rng.random() < weight % 1))
