"""The trunk writes its training prompts itself: heads learn on what it was taught on, and no data set is needed.

A trunk that was taught to chat, given its chat template only up to where the user's words would stand, goes on with a
user's words (Magpie, arXiv 2406.08464):

    <|im_start|>user\\n                           the opening, which it is given
    How do I keep bread fresh?<|im_end|>         what it writes, up to the end of the turn: a prompt

A trunk without chat template goes on from its start token, and the first tokens it writes are a text to complete.
"""

import hashlib
import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hispec.decode.request import SamplingParams
from hispec.errors import DataError
from hispec.model import HiSpecModel
from hispec.train.data_config import DataConfig
from hispec.train.masks import encode_opening
from hispec.train.packaged import prompt_row
from hispec.train.rows import Row
from hispec.train.writing import Key, Task, Writing, seed_of

log = logging.getLogger("hispec")
# The trunk's own distribution: prompts as varied as what it was taught on.
TEMPERATURE = 1.0
# Tokens of the longest prompt; most questions end before, and what goes on is left out.
LONGEST = 96
# Tokens of the beginning of a text, where there is no turn to end.
BEGINNING = 32
# Far from the seeds of answers, whose noise must be other noise.
SEEDS = 1 << 48


@dataclass(frozen=True)
class Opening:
    """What the trunk writes prompts from, and what ends one besides its own stop tokens.

    `chat`: a prompt is a user's turn that has ended; otherwise it is a text that has not.
    """

    ids: list[int]
    chat: bool
    stop_ids: list[int] = field(default_factory=list)
    stop: list[str] = field(default_factory=list)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return LONGEST if self.chat else BEGINNING


def opening_of(tokenizer: PreTrainedTokenizerBase) -> Opening:
    """The beginning of the chat template, or the start token.

    Raises:
        DataError: there is neither, or the template does not show the user's words.
    """
    if tokenizer.chat_template:
        ids, after = encode_opening(tokenizer)
        return Opening(ids, True, *_end_of_turn(tokenizer, after))
    if tokenizer.bos_token_id is None:
        raise DataError(
            "data.own_prompts: this model has neither a chat template nor a start token to write prompts from;"
            " give chat_template=FILE, or other prompts"
        )
    return Opening([int(tokenizer.bos_token_id)], False)


class OwnPrompts:
    """The prompts that one trunk has written, kept in a folder."""

    def __init__(self, model: HiSpecModel, config: DataConfig, seed: int, folder: Path) -> None:
        """Raises as `opening_of`."""
        self.config, self.seed = config, seed
        self.opening = opening_of(model.tokenizer)
        # The template, not the opening: some templates print the day's date.
        template = str(model.tokenizer.chat_template).encode()
        how = {
            "temperature": TEMPERATURE,
            "max_new_tokens": self.opening.longest,
            "seed": seed,
            "chat_template": hashlib.sha256(template).hexdigest()[:16] if self.opening.chat else None,
        }
        self._writing = Writing(model, folder, "prompt", ("number",), how)

    def write(self, rank: int = 0, world: int = 1) -> None:
        """Write this rank's share of what is missing. Raises as `Writing.write`."""
        keys = [(number,) for number in range(self.config.own_prompts)]
        self._writing.write(keys, self._task, self.config.answer_batch, rank, world)

    def rows(self) -> list[Row]:
        """The prompts that can be used, each once; call it when all ranks have written.

        Raises:
            DataError: there are none.
        """
        kept: dict[str, Row] = {}
        left_out: Counter[str] = Counter()
        for (number,), line in sorted(self._writing.done().items()):
            if number >= self.config.own_prompts:
                break
            # The last character may be half of one.
            text = line["text"].rstrip("\ufffd").strip()
            if line["finish_reason"] != ("stop" if self.opening.chat else "length"):
                left_out["did not end" if self.opening.chat else "ended at once"] += 1
            elif not text:
                left_out["empty"] += 1
            elif text in kept:
                left_out["there already"] += 1
            else:
                where = f"own prompt {number}"
                kept[text] = prompt_row(where, text) if self.opening.chat else Row(where, text=text, unfinished=True)
        why = "".join(f", {count} {reason}" for reason, count in left_out.items())
        if not kept:
            raise DataError(
                f"data.own_prompts: none of the {self.config.own_prompts} that the trunk wrote can be used{why};"
                " ask for more, or give other prompts"
            )
        log.info("own prompts: %d of %d kept%s", len(kept), self.config.own_prompts, why)
        return list(kept.values())

    def _task(self, key: Key) -> Task:
        params = SamplingParams(
            temperature=TEMPERATURE,
            max_new_tokens=self.opening.longest,
            seed=SEEDS + seed_of(self.seed, key[0]),
            stop_ids=self.opening.stop_ids,
            stop=self.opening.stop,
        )
        return Task(self.opening.ids, params)


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, after: str) -> tuple[list[int], list[str]]:
    """Token ids and strings that end the user's turn, from what the template prints after it."""
    if not after:
        return [], []
    ids: list[int] = tokenizer(after, add_special_tokens=False)["input_ids"]
    token: Any = tokenizer.added_tokens_decoder.get(ids[0])
    if token is None or ids[0] == tokenizer.unk_token_id:
        return [], [after.split()[0]]  # words, such as [/INST]
    return ([ids[0]], []) if token.special else ([], [token.content])
