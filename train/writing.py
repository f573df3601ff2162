"""Texts that the trunk writes through the decoder, kept in a folder as they are finished.

FOLDER/RANK.jsonl: the first line says which model wrote it and how, then one line per text as soon as it is finished.
Each rank writes its share, into a file of its own, and a run that is interrupted goes on with what is missing,
whatever the number of ranks was.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hispec.decode.decoder import Decoder
from hispec.decode.request import SamplingParams
from hispec.errors import DataError, FileError
from hispec.model import HiSpecModel
from hispec.train import ranks

# What names a text among those of its folder: which prompt and which of its samples, say.
Key = tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """A text to be written: the token ids it goes on from, how, and what its line says besides."""

    prompt: list[int]
    params: SamplingParams
    about: dict[str, str] = field(default_factory=dict)


class Writing:
    """A folder of texts that one model has written in one way."""

    def __init__(
        self, model: HiSpecModel, folder: Path, unit: str, names: tuple[str, ...], how: dict[str, Any]
    ) -> None:
        """`unit`: what one text is called. `names`: what the numbers of a key are called in a line.

        `how`: what the texts depend on besides the model.
        """
        self.model, self.folder, self.unit, self.names = model, folder, unit, names
        self.provenance = {
            "model": model.base,
            "revision": model.revision,
            "dtype": str(model.trunk.dtype).removeprefix("torch."),
            **how,
        }

    def write(self, keys: Sequence[Key], task: Callable[[Key], Task], batch: int, rank: int, world: int) -> None:
        """Write this rank's share of what is missing of `keys`, `batch` texts side by side.

        Raises:
            DataError: the folder holds texts of other settings. FileError: it cannot be written.
        """
        path = self.folder / f"{rank:05d}.jsonl"
        _repair(path)
        done = self.done()
        if self.model.trunk.in_step:
            # All ranks run a sharded trunk together, so all write the same; the first one's is kept.
            ranks.meet()
            rank, world, path = 0, 1, path if rank == 0 else Path(os.devnull)
        missing = [key for key in keys[rank::world] if key not in done]
        if not missing:
            return
        tasks = [task(key) for key in missing]
        decoder = Decoder(self.model, exits=(), policy="fixed:1", max_batch=batch)
        completions = decoder.generate_as_completed([own.prompt for own in tasks], [own.params for own in tasks])
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            bar = tqdm(total=len(missing), desc=f"{self.unit}s", unit=self.unit, disable=True if rank else None)
            with path.open("a") as file, bar:
                if not file.tell():
                    file.write(json.dumps({"provenance": self.provenance}) + "\n")
                for completion in completions:
                    at = completion.index
                    line = {**dict(zip(self.names, missing[at], strict=True)), **tasks[at].about, "ids": completion.ids}
                    line |= {"text": completion.text, "finish_reason": completion.finish_reason}
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                    bar.update()
                    bar.set_postfix_str(f"{decoder.stats.tokens_per_second:.0f} tokens/s", refresh=False)
        except OSError as error:
            raise FileError(f"cannot write {self.unit}s to {path}: {error.strerror or error}") from None
        finally:
            decoder.close()

    def done(self) -> dict[Key, dict[str, Any]]:
        """The lines that are there, of any rank; what another rank is just writing is not.

        Raises:
            DataError: they are of other settings.
        """
        done: dict[Key, dict[str, Any]] = {}
        for path in sorted(self.folder.glob("*.jsonl")):
            lines = path.read_text().split("\n")[:-1]  # what follows the last line feed is not finished
            if lines:
                _check(path, json.loads(lines[0]).get("provenance", {}), self.provenance)
            items = [json.loads(line) for line in lines[1:]]
            done |= {tuple(item[name] for name in self.names): item for item in items}
        return done


def seed_of(seed: int, number: int) -> int:
    """A seed for each text of a run of its own: whatever was there already, an interrupted run writes the same."""
    return seed * 1_000_003 + number


def _check(path: Path, written: dict[str, Any], provenance: dict[str, Any]) -> None:
    for name, value in provenance.items():
        if written.get(name) != value:
            raise DataError(
                f"{path} was written with {name}={written.get(name)!r}, this run has {value!r};"
                " remove the file, or give another run_dir"
            )


def _repair(path: Path) -> None:
    """Cut off a half-written last line."""
    if path.is_file():
        whole, feed, _ = path.read_text().rpartition("\n")
        path.write_text(whole + feed)
