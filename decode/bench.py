"""hispec-bench as a command: a run, two results side by side, or pictures of a result."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hispec.decode.bench_options import BenchOptions, help_text, read_options
from hispec.decode.report import compare, report
from hispec.decode.results import read_json, write_json
from hispec.errors import ConfigError, FileError, command


@command
def main(arguments: list[str]) -> None:
    if not arguments or {"-h", "--help", "help"} & set(arguments):
        print(help_text(), end="")
    elif arguments[0] == "compare":
        before, after = _two(arguments, "a.json b.json")
        print(compare(read_json(before), read_json(after)))
    elif arguments[0] == "plot":
        source, folder = _two(arguments, "result.json FOLDER")
        _draw(read_json(source), folder)
    else:
        measure(read_options(arguments))


def measure(options: BenchOptions) -> None:
    """Run, print, write and draw; what is finished is kept, whatever ends the run.

    Raises:
        HiSpecError: whatever is wrong with what was asked.
    """
    output, plots = (None if place is None else Path(place) for place in (options.output, options.plots))
    for place in filter(None, (output and output.parent, plots)):
        _check_place(place)
    from hispec.decode.bench_run import Bench

    bench = Bench(options)
    try:
        bench.run()
    finally:
        if bench.turns:
            print(report(bench.result()))
            if output is not None:
                write_json(output, bench.result())
    if plots is not None:
        _draw(bench.result(), plots)


def _two(arguments: Sequence[str], names: str) -> tuple[Path, Path]:
    if len(arguments) != 3:
        raise ConfigError(f"write: hispec-bench {arguments[0]} {names}")
    return Path(arguments[1]), Path(arguments[2])


def _check_place(folder: Path) -> None:
    """Fail before an hour of measuring, not behind it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot write to {folder}: {error.strerror}; choose another place") from None
    if not os.access(folder, os.W_OK):
        raise FileError(f"cannot write to {folder}; choose another place")


def _draw(result: dict[str, Any], folder: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        print("no pictures: matplotlib is missing; run: pip install 'hispec[bench]'", file=sys.stderr)
        return
    from hispec.decode.plots import draw

    for path in draw(result, folder):
        print(path, file=sys.stderr)


if __name__ == "__main__":
    main()
