"""What tests of decoding share: runs of the bare engine, heads that err on purpose, a model that says a script."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tiny_models import GQA, build, reference
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from hispec import Decoder, HiSpecModel
from hispec.config import HeadConfig, HeadKind
from hispec.decode.blocks import BlockPool
from hispec.decode.engine import Engine
from hispec.decode.hierarchy import make_cache, make_levels
from hispec.decode.policy import FixedPolicy
from hispec.decode.request import SamplingParams
from hispec.decode.sequence import Sequence as Live
from hispec.decode.stats import Stats
from hispec.decode.text import TextStream
from hispec.heads import Head
from hispec.trunk import Trunk

N_BLOCKS = 64
# 1, 2, 7 and 33 ids; together with 48 new ones they cross block edges (16) and sliding windows (8).
PROMPTS = [[5], [5, 17], [5, 17, 101, 33, 9, 150, 7], list(range(40, 73)), [9, 8, 7]]
N_NEW = 48


class Run(NamedTuple):
    """What a run gave: new ids per prompt, what each pass of the last level committed, and the counts."""

    ids: list[list[int]]
    rounds: list[list[list[int]]]
    stats: Stats


@cache
def trunk(name: str) -> Trunk:
    return Trunk(build(name))


@cache
def greedy(name: str, prompt: tuple[int, ...], n: int = N_NEW) -> list[int]:
    """Plain greedy decoding by the library's own forward, without a cache."""
    return reference(build(name), prompt, n)[0]


def wanted(name: str, prompts: Sequence[Sequence[int]] = PROMPTS, n: int = N_NEW) -> list[list[int]]:
    return [greedy(name, tuple(prompt))[:n] for prompt in prompts]


def make_engine(
    own: Trunk,
    heads: Sequence[Head],
    windows: Sequence[int],
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    max_batch: int = 8,
    pool: BlockPool | None = None,
    lookup: bool = False,
) -> Engine:
    """An engine with these prompts queued."""
    levels = make_levels(own, list(heads))
    pool = pool or BlockPool(N_BLOCKS)
    policy, kv = FixedPolicy(len(levels), windows), make_cache(levels, pool.n_blocks)
    engine = Engine(levels, policy, kv, pool, max_batch, lookup=lookup)
    for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        text = TextStream(byte_tokenizer())  # without stop strings it decodes nothing until it is asked
        engine.add(Live(index, list(prompt), each, len(levels), own.vocab_size, (), text))
    return engine


def drain(engine: Engine, n: int) -> Run:
    """Run it to its end, `n` requests; every block comes back, and every token says whose choice it was."""
    rounds: list[list[list[int]]] = [[] for _ in range(n)]
    for sequence, tokens in engine.run():
        rounds[sequence.index].append(tokens)
        assert len(sequence.chosen_by) == len(sequence.ids) - sequence.n_prompt
    assert engine.pool.n_free == engine.pool.n_blocks
    return Run([[token for tokens in own for token in tokens] for own in rounds], rounds, engine.stats)


def decode(
    own: Trunk,
    heads: Sequence[Head],
    windows: Sequence[int],
    prompts: Sequence[Sequence[int]] = PROMPTS,
    n: int = N_NEW,
    each: Sequence[SamplingParams] | None = None,
    lookup: bool = False,
    **options: Any,
) -> Run:
    """Decode all prompts; `options` are sampling options of all of them, or `each` has its own."""
    params = each or [SamplingParams(max_new_tokens=n, **options)] * len(prompts)
    return drain(make_engine(own, heads, windows, prompts, params, lookup=lookup), len(prompts))


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Equal to fp32 rounding, seen against the largest value: numbers of the tiny models reach far beyond 1."""
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * max(1.0, float(expected.abs().max())))


def random_heads(own: Trunk, exits: Sequence[int], kind: HeadKind, vocab_ids: Tensor | None = None) -> list[Head]:
    """Heads with nothing learnt, and away from the logit lens they start as."""
    size = None if vocab_ids is None else len(vocab_ids)
    heads = [Head(own, e, HeadConfig(kind=kind, vocab_size=size), slot, vocab_ids) for slot, e in enumerate(exits)]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in (p for head in heads for p in head.parameters()):
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator).to(parameter.device))
    return heads


class FlakyHead(Head):
    """The logit lens, wrong in the calls that `wrong` picks: there every token is mistaken for its neighbour.

    Behind the last layer the logit lens is the full model, so such a head is right but where it is told not to be.
    """

    def __init__(
        self, own: Trunk, exit_: int, wrong: Callable[[int], bool] = lambda call: False, slot: int = 0
    ) -> None:
        super().__init__(own, exit_, HeadConfig(kind="mlp"), slot)
        self.wrong, self.calls = wrong, 0

    def logits(self, features_TD: Tensor) -> Tensor:
        logits_TV = super().logits(features_TD)
        self.calls += 1
        return logits_TV.roll(1, dims=-1) if self.wrong(self.calls - 1) else logits_TV


def perfect_heads(own: Trunk, n: int) -> list[Head]:
    """`n` levels of the full model's own head, all behind its last layer."""
    return [FlakyHead(own, own.n_layers) for _ in range(n)]


def silenced(name: str, exit_: int) -> PreTrainedModel:
    """A model of F1 whose layers from `exit_` on add nothing, but store keys and values: a perfect shallow exit."""
    model = build(name)
    layers: Any = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 6)
    with torch.no_grad():
        for layer in layers[exit_:]:
            for key, parameter in layer.named_parameters():
                if any(part in key for part in ("o_proj", "out_proj", "down_proj", "fc2")):
                    parameter.zero_()
    return model


def scripted(script: Sequence[int], vocab_size: int, n_layers: int = 4) -> PreTrainedModel:
    """A real OPT that says `script[p]` after position p, whatever it read; every exit of it is perfect."""
    width = 128
    config = OPTConfig(
        vocab_size=vocab_size, hidden_size=width, ffn_dim=8, num_hidden_layers=n_layers, num_attention_heads=2,
        dropout=0.0, max_position_embeddings=width, word_embed_proj_dim=width, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = OPTForCausalLM(config)
    model = model.float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(parameter.dim() == 1)  # what remains are the norms
        model.model.decoder.embed_positions.weight[2:] = torch.eye(width)
        for position in range(width):
            model.lm_head.weight[script[position % len(script)], position] = 1.0
    result: PreTrainedModel = model
    return result


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte and two longer ones; `<s>` is 0, `</s>` is 1."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate(["<s>", "</s>", *alphabet, "Ġ" + "t", "CĠ"])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "t"), ("C", "Ġ")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    make: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = make(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    return tokenizer


def with_heads(
    model: PreTrainedModel | Trunk, exits: Sequence[int] = (), kind: HeadKind = "mlp", base: str = "tiny"
) -> HiSpecModel:
    """A model with untrained heads and the byte tokenizer, ready for a Decoder."""
    own = model if isinstance(model, Trunk) else Trunk(model)
    heads = nn.ModuleList(random_heads(own, exits, kind))
    return HiSpecModel(own, byte_tokenizer(), heads, base)


def write_base(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A tiny llama with the byte tokenizer, on disk."""
    torch.manual_seed(seed)
    config = LlamaConfig(**GQA | {"vocab_size": len(byte_tokenizer()), "initializer_range": 0.3} | changes)
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@contextmanager
def decoding(model: HiSpecModel, **options: Any) -> Iterator[Decoder]:
    """A decoder that gives back what it changed in the model; the paper's policy, if none is named."""
    decoder = Decoder(model, **{"policy": "fixed:2,4", **options})
    try:
        yield decoder
    finally:
        decoder.close()
