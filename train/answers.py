"""The trunk answers the training prompts itself, through the decoder: what decoding will see is what heads learn.

answers.jsonl: the first line says which model wrote it and how, then one line per answer as soon as it is finished. A
run that is interrupted goes on with what is missing.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hispec.decode.decoder import Decoder
from hispec.decode.request import SamplingParams
from hispec.errors import DataError, FileError
from hispec.model import HiSpecModel
from hispec.train.config import DataConfig
from hispec.train.data import Document
from hispec.train.masks import Message, encode_prompt, supervised
from hispec.train.rows import Row

log = logging.getLogger("hispec")
# Which prompt, and which of its samples.
Key = tuple[int, int]


def answered(model: HiSpecModel, rows: Sequence[Row], config: DataConfig, seed: int, path: Path) -> list[Document]:
    """One document per answer, made of the very ids that were generated; rows of plain text are not touched.

    Raises:
        DataError: `path` holds answers of other settings; no prompt can be answered. FileError: it cannot be written.
    """
    prompts = _prompts(model, rows, config)
    provenance = _provenance(model, prompts, config, seed)
    done = _finished(path, provenance)
    missing = [
        (index, sample)
        for index in range(len(prompts))
        for sample in range(config.samples)
        if (index, sample) not in done
    ]
    if missing:
        _write(model, prompts, missing, config, seed, path, done, provenance)
    documents = []
    for key in sorted(done):
        prompt, ids = prompts[key[0]], done[key]
        answer = [False] * len(prompt) + [True] * len(ids)
        whole = [*prompt, *ids][: config.max_len]
        marks = supervised(answer[: config.max_len])
        if any(marks):
            documents.append(Document(whole, marks))
    if not documents:
        raise DataError(f"no prompt fits data.max_len={config.max_len} with an answer; raise it")
    return documents


def prompt_of(row: Row) -> list[Message]:
    """The turns before the first answer."""
    answers = [number for number, message in enumerate(row.messages) if message["role"] == "assistant"]
    return list(row.messages[: answers[0]] if answers else row.messages)


def _prompts(model: HiSpecModel, rows: Sequence[Row], config: DataConfig) -> list[list[int]]:
    encoded = [encode_prompt(model.tokenizer, turns) for row in rows if (turns := prompt_of(row))]
    room = min(config.max_len, model.trunk.max_positions - config.max_new_tokens)
    fitting = [ids for ids in encoded if 0 < len(ids) < room]
    if len(fitting) < len(rows):
        log.warning(
            "%d rows skipped: no prompt of fewer than %d tokens before the first answer", len(rows) - len(fitting), room
        )
    if not fitting:
        raise DataError(
            f"data.answers=trunk: none of {len(rows)} rows has a prompt that fits; raise data.max_len={config.max_len}"
        )
    return fitting


def _provenance(model: HiSpecModel, prompts: list[list[int]], config: DataConfig, seed: int) -> dict[str, Any]:
    return {
        "model": model.base,
        "revision": model.revision,
        "dtype": str(model.trunk.dtype).removeprefix("torch."),
        "temperature": config.temperature,
        "samples": config.samples,
        "max_new_tokens": config.max_new_tokens,
        "seed": seed,
        "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16],
    }


def _finished(path: Path, provenance: dict[str, Any]) -> dict[Key, list[int]]:
    """The answers that are there; a half-written last line is cut off."""
    if not path.is_file():
        return {}
    lines = path.read_text().split("\n")
    whole = lines[:-1]  # what follows the last line feed was not finished
    if not whole:
        return {}
    header = json.loads(whole[0]).get("provenance", {})
    for name, value in provenance.items():
        if header.get(name) != value:
            raise DataError(
                f"{path} was written with {name}={header.get(name)!r}, this run has {value!r};"
                " remove the file, or give another run_dir"
            )
    if lines[-1]:
        path.write_text("\n".join(whole) + "\n")
    items = [json.loads(line) for line in whole[1:]]
    return {(item["prompt"], item["sample"]): item["ids"] for item in items}


def _write(
    model: HiSpecModel,
    prompts: list[list[int]],
    missing: list[Key],
    config: DataConfig,
    seed: int,
    path: Path,
    done: dict[Key, list[int]],
    provenance: dict[str, Any],
) -> None:
    params = [_params(config, seed, key) for key in missing]
    decoder = Decoder(model, exits=(), max_batch=config.answer_batch)
    completions = decoder.generate_as_completed([prompts[index] for index, _ in missing], params)
    try:
        with path.open("a") as file, tqdm(total=len(missing), desc="answers", unit="answer", disable=None) as bar:
            if not done:
                file.truncate(0)
                file.write(json.dumps({"provenance": provenance}) + "\n")
            for completion in completions:
                key = missing[completion.index]
                done[key] = completion.ids
                line = {"prompt": key[0], "sample": key[1], "ids": completion.ids, "text": completion.text}
                file.write(json.dumps(line | {"finish_reason": completion.finish_reason}) + "\n")
                file.flush()
                bar.update()
                bar.set_postfix_str(f"{decoder.stats.tokens_per_second:.0f} tokens/s", refresh=False)
    except OSError as error:
        raise FileError(f"cannot write answers to {path}: {error.strerror or error}") from None
    finally:
        decoder.close()


def _params(config: DataConfig, seed: int, key: Key) -> SamplingParams:
    # A seed of its own for every answer: an interrupted run writes the same ones.
    own = seed * 1_000_003 + key[0] * config.samples + key[1]
    return SamplingParams(temperature=config.temperature, max_new_tokens=config.max_new_tokens, seed=own)
