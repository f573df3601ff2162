"""A disk that is full is one clear error, and what was there stays."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from decode_fixtures import write_base
from train_fixtures import config

from hispec import HiSpecModel
from hispec.config import HeadConfig
from hispec.decode.options import DecodeOptions
from hispec.decode.prompts import OutputFile, PromptRow
from hispec.decode.request import Completion, SamplingParams
from hispec.errors import FileError
from hispec.train.metrics import Metrics, read


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """The operating system lets no file grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_export_leaves_the_old_heads(tmp_path: Path) -> None:
    model = HiSpecModel.from_base(write_base(tmp_path), (2, 4), HeadConfig(kind="mlp"))
    model.save_pretrained(tmp_path / "heads")
    before = {path.name: path.read_bytes() for path in (tmp_path / "heads").iterdir()}
    with files_end_at(20_000), pytest.raises(FileError, match="cannot write .*heads: .*free space"):
        model.save_pretrained(tmp_path / "heads")
    assert {path.name: path.read_bytes() for path in (tmp_path / "heads").iterdir()} == before
    assert not list(tmp_path.glob(".heads-*"))


def test_output_keeps_finished_lines(tmp_path: Path) -> None:
    rows = [PromptRow(n + 1, "prompt", "a", SamplingParams(), {}) for n in range(3)]
    options = DecodeOptions(model="x")
    out = tmp_path / "out.jsonl"
    output = OutputFile(out, options, rows, overwrite=False)
    output.write(2, Completion(2, [1], [5], "b", "length"))
    size = output.part.stat().st_size
    with files_end_at(size + 20):
        with pytest.raises(FileError, match="finished lines are kept in .*out.jsonl.part"):
            output.write(0, Completion(0, [1], [5], "b", "length"))
        output.close()
    again = OutputFile(out, options, rows, overwrite=False)
    assert again.missing == [0, 1]
    for number in again.missing:
        again.write(number, Completion(number, [1], [5], "b", "length"))
    with files_end_at(size), pytest.raises(FileError, match="cannot write beside .*out.jsonl"):
        again.finish()
    assert not out.exists() and len(again.part.read_text().splitlines()) == 4


def test_metrics(tmp_path: Path) -> None:
    settings = config(tmp_path, write_base(tmp_path))
    folder = Path(settings.run_dir)
    metrics = Metrics(folder, settings, 0)
    metrics.log(1, {"loss": 2.0})
    with files_end_at(metrics.path.stat().st_size), pytest.raises(FileError, match="cannot write .*metrics.jsonl"):
        metrics.log(2, {"loss": 1.0})
    assert read(metrics.path) == [{"step": 1, "loss": 2.0}]
