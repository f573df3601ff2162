"""What tests of training share: the T1 tokenizer, model folders, and runs of a recipe."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tiny_models import VOCAB, build
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from hispec.train.config import TrainConfig
from hispec.train.metrics import read

WORDS = "<pad> <s> </s> <unk> <|user|> <|assistant|> <|end|> hi there ok yes A B C D".split()
PLAIN = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GENERATION = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|> {% if m.role=='assistant' %}{% generation %}"
    "{{ m.content }} <|end|>{% endgeneration %}{% else %}{{ m.content }} <|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHAT = [
    {"role": "user", "content": "hi there"},
    {"role": "assistant", "content": "ok yes"},
    {"role": "user", "content": "A B"},
    {"role": "assistant", "content": "C D"},
]
CHAT_IDS = [1, 4, 7, 8, 6, 5, 9, 10, 6, 4, 11, 12, 6, 5, 13, 14, 6]


def t1(template: str | None = PLAIN, size: int = len(WORDS)) -> PreTrainedTokenizerFast:
    """T1: words, and a post-processor that puts `<s>` in front. `size` adds words w15, w16, ... up to so many."""
    words = WORDS + [f"w{number}" for number in range(len(WORDS), size)]
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
        additional_special_tokens=["<|user|>", "<|assistant|>", "<|end|>"],
    )  # fmt: skip
    tokenizer.chat_template = template
    return tokenizer


def model_folder(folder: Path, name: str, template: str | None = PLAIN) -> Path:
    """A model of F1 with T1, as a folder."""
    target = folder / name
    build(name).save_pretrained(target)
    t1(template, VOCAB).save_pretrained(target)
    return target


def text_file(folder: Path, rows: int = 12, seed: int = 0) -> Path:
    """Texts of T1's words, some long, some short, as lines of JSON."""
    target = folder / f"text{rows}_{seed}.jsonl"
    lines = []
    for row in range(rows):
        words = " ".join(
            f"w{15 + (7 * row + 3 * at + seed + at * at) % (VOCAB - 15)}" for at in range(3 + 11 * row % 40)
        )
        lines.append(f'{{"text": "{words}"}}')
    target.write_text("\n".join(lines) + "\n")
    return target


def prompts_file(folder: Path) -> Path:
    """Held-out prompts of T1's words."""
    target = folder / "prompts.jsonl"
    target.write_text("".join(f'{{"prompt": "{text}"}}\n' for text in ("hi there w40", "w20 w21 ok", "A B C D w100")))
    return target


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Hash of all bytes of named tensors, in their order."""
    sha = hashlib.sha256()
    for name, tensor in tensors:
        sha.update(name.encode() + tensor.detach().contiguous().cpu().numpy().tobytes())
    return sha.hexdigest()


def losses(run_dir: str | Path) -> list[float]:
    """The loss of every step of a run."""
    return [line["loss"] for line in read(Path(run_dir) / "metrics.jsonl") if "loss" in line]


def config(folder: Path, model: str | Path, **changes: Any) -> TrainConfig:
    """Settings of a run of a few steps; `changes` are written `train__lr=...`."""
    values: dict[str, Any] = {
        "model": str(model),
        "exits": [2, 4],
        "run_dir": str(folder / "run"),
        "data": {"source": [str(text_file(folder))], "max_len": 64},
        "train": {"max_steps": 3, "micro_batch_tokens": 96, "lr": 1e-3, "warmup": 0.25},
        "eval": {"prompts": str(prompts_file(folder)), "max_new_tokens": 12},
    }
    for key, value in changes.items():
        *path, last = key.split("__")
        at = values
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return TrainConfig.build(values)
