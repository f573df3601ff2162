"""`plan=true`: what a recipe would do, told without loading a weight."""

import math
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from hispec.base import base_config, locate
from hispec.config import HeadConfig
from hispec.train import launch, ranks, setup
from hispec.train.answers import prompt_of
from hispec.train.batch import solve
from hispec.train.config import TrainConfig
from hispec.train.data import documents_of
from hispec.train.loop import n_steps
from hispec.train.masks import encode_prompt

GB = 1e9


def describe(config: TrainConfig) -> list[str]:
    """Lines for a person.

    Raises:
        HiSpecError: as `setup.prepare`, for what can be known without weights.
    """
    base = setup.base_of(config)
    settings = base_config(base, config.revision)
    text: Any = settings.get_text_config()
    exits = config.exits_for(int(text.num_hidden_layers))
    heads = config.heads_for(len(exits))
    n_trunk, n_block = _sizes(settings, int(text.num_hidden_layers))
    hidden = int(text.hidden_size)
    trained = [_trained(head, hidden, n_block) for head in heads]
    tokens, note = _tokens(config, base)
    world = launch.planned(config.launch)
    triple = solve(config.train, world)
    steps = n_steps(config.train, max(1, math.ceil(tokens / triple.micro)), triple.accumulation * world)
    dtype = setup.dtype_of(config)
    size = torch.finfo(getattr(torch, dtype)).bits // 8
    # float32 weights, gradients and two averages of AdamW; three logits-sized tensors per chunk.
    memory = n_trunk * size + sum(trained) * 16 + 12 * config.train.loss.chunk * int(text.vocab_size)
    cache = tokens * hidden * size * (len(exits) + 1) if config.data.cache else 0
    return [
        f"model      {config.model}, {n_trunk / 1e6:.1f} M parameters, {text.num_hidden_layers} layers, {dtype}",
        f"device     {ranks.device()}, {world} rank{'s' if world > 1 else ''}, ZeRO stage {config.train.zero}",
        *(
            f"exit {exit_:<5} {_head(head)}, {n / 1e6:.2f} M trainable"
            for exit_, head, n in zip(exits, heads, trained, strict=True)
        ),
        f"data       about {tokens:,} tokens an epoch{note}",
        f"batch      {triple} tokens a step",
        f"steps      about {steps}, learning rate {config.train.lr:g}, a checkpoint every {config.train.save_every}",
        f"memory     about {memory / GB:.2f} GB per rank, besides activations",
        f"disk       about {cache / GB:.2f} GB of cached features",
        f"run folder {config.run_dir} (config.yaml, metrics.jsonl, answers.jsonl, features/, checkpoints/)",
        f"export     {config.export or config.run_dir + '/heads'}",
    ]


def _tokens(config: TrainConfig, base: str) -> tuple[int, str]:
    """Tokens of an epoch, and what is not known about them yet."""
    rows = setup.read_rows(config)
    tokenizer: Any = AutoTokenizer.from_pretrained(locate(base), revision=config.revision)
    if config.chat_template is not None:
        tokenizer.chat_template = setup.read_template(config.chat_template)
    data = config.data
    given, tokens, note = list(rows.texts), data.stdlib_tokens, ""
    if data.answers == "trunk" and rows.chats:
        prompts = sum(len(encode_prompt(tokenizer, prompt_of(row))) for row in rows.chats)
        tokens += (prompts + len(rows.chats) * data.max_new_tokens) * data.samples
        n_answers = len(rows.chats) * data.samples
        note = f" at most ({n_answers} answers of up to {data.max_new_tokens} tokens are still to be written)"
    else:
        given += rows.chats
    if given:
        tokens += sum(len(document.ids) for document in documents_of(given, tokenizer, data.max_len, data.strict)[0])
    return tokens, note


def _sizes(settings: PretrainedConfig, n_layers: int) -> tuple[int, int]:
    """Parameters of the trunk, and of one of its layers, counted on a model without storage."""
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(settings)  # type: ignore[no-untyped-call]
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == n_layers)
    return sum(p.numel() for p in model.parameters()), sum(p.numel() for p in layers[0].parameters())


def _trained(head: HeadConfig, hidden: int, n_block: int) -> int:
    extra = {
        "norm": 0,
        "mlp": round(3 * head.width * hidden * hidden) + hidden,
        "block": n_block + (hidden + 1) * hidden,
    }
    return hidden + extra[head.kind]


def _head(head: HeadConfig) -> str:
    return f"{head.kind} head, {'whole vocabulary' if head.vocab_size is None else f'{head.vocab_size} tokens'}"
