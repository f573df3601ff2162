"""The trunk answers the training prompts itself, through the decoder: what decoding will see is what heads learn."""

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from hispec.decode.request import SamplingParams
from hispec.errors import DataError
from hispec.model import HiSpecModel
from hispec.train.data import Document
from hispec.train.data_config import DataConfig
from hispec.train.masks import supervised
from hispec.train.writing import Key, Task, Writing, seed_of

log = logging.getLogger("hispec")


class Answers:
    """The answers to some prompts, kept in a folder."""

    def __init__(
        self, model: HiSpecModel, prompts: Sequence[list[int]], config: DataConfig, seed: int, folder: Path
    ) -> None:
        """`prompts`: token ids; those that leave no room for an answer are left out.

        Raises:
            DataError: no prompt can be answered.
        """
        room = model.trunk.max_positions - config.max_new_tokens
        self.prompts = [ids for ids in prompts if len(ids) < room]
        if len(self.prompts) < len(prompts):
            left_out = len(prompts) - len(self.prompts)
            log.warning("%d prompts skipped: they leave no room for data.max_new_tokens in the model", left_out)
        if not self.prompts:
            raise DataError(
                f"data.answers=trunk: none of {len(prompts)} prompts fits; lower data.max_new_tokens (now"
                f" {config.max_new_tokens}) or give shorter ones"
            )
        self.model, self.config, self.seed = model, config, seed
        how = {
            "temperature": config.temperature,
            "samples": config.samples,
            "max_new_tokens": config.max_new_tokens,
            "seed": seed,
            "prompts": hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()[:16],
        }
        self._writing = Writing(model, folder, "answer", ("prompt", "sample"), how)

    def write(self, rank: int = 0, world: int = 1) -> None:
        """Write this rank's share of what is missing. Raises as `Writing.write`."""
        keys = [(index, sample) for index in range(len(self.prompts)) for sample in range(self.config.samples)]
        self._writing.write(keys, self._task, self.config.answer_batch, rank, world)

    def documents(self) -> list[Document]:
        """One document per answer, made of the very ids that were generated; call it when all ranks have written.

        Raises:
            DataError: none is left.
        """
        documents = []
        max_len = self.config.max_len
        for (index, _), line in sorted(self._writing.done().items()):
            prompt, ids = self.prompts[index], line["ids"]
            answer = [False] * len(prompt) + [True] * len(ids)
            marks = supervised(answer[:max_len])
            if any(marks):
                documents.append(Document([*prompt, *ids][:max_len], marks))
        if not documents:
            raise DataError(f"no prompt fits data.max_len={max_len} with an answer; raise it")
        return documents

    def _task(self, key: Key) -> Task:
        index, sample = key
        config, prompt = self.config, self.prompts[index]
        params = SamplingParams(
            temperature=config.temperature,
            max_new_tokens=config.max_new_tokens,
            seed=seed_of(self.seed, index * config.samples + sample),
        )
        # Special tokens stay: without what stands between them, the words of two turns would run into one.
        text = self.model.tokenizer.decode(prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return Task(prompt, params, {"prompt_text": str(text)})
