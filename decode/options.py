"""What can be said to hispec-decode, and its help. Imports no torch: the help must be there at once."""

from typing import Literal

from pydantic import Field

from hispec.config import field_help
from hispec.decode.request import SamplingParams

Precision = Literal["auto", "float32", "bfloat16", "float16"]

HELP = """\
hispec-decode: generate text with a model and its early-exit heads. The output is the full model's own.

  hispec-decode model=HEADS prompt="Once upon a time"          one prompt, streamed
  cat prompt.txt | hispec-decode model=HEADS                   the prompt from stdin
  hispec-decode model=HEADS prompts=in.jsonl output=out.jsonl  many prompts, batched; a stopped run goes on
  hispec-decode model=HEADS chat=true                          talk to the model
  hispec-decode model=org/name heads=shared exits=[4,8] ...    a model pre-trained for early exit, without trained heads
  hispec-decode recipe=layerskip-llama3-8b prompt=...          the same, with the exits that are known to be good

HEADS is a folder that hispec-train wrote, or its id on the Hub. Lines of in.jsonl hold "prompt", "messages" or
"prompt_ids"; they may set any sampling option, what else they hold is copied to the output. Lists are written [4,8].

options (key=value):
"""


class DecodeOptions(SamplingParams):
    """Everything hispec-decode understands: where from, where to, how fast, and how to sample."""

    recipe: str | None = None
    """Packaged settings, which those typed here replace; a name that does not exist lists them."""
    model: str
    """Heads folder or Hub id; or a plain model, with heads=shared or exits=[]."""
    base: str | None = None
    """Use this trunk (folder, Hub id or package:NAME) instead of the place recorded in the heads."""
    revision: str | None = None
    """Hub revision of `model`."""
    heads: Literal["trained", "shared"] = "trained"
    """shared: `model` is a plain model, read at every exit by its own final norm and lm_head."""
    exits: list[int] | None = None
    """Exits to use, shallow to deep; null: all that have heads; []: plain decoding."""
    prompt: str | None = None
    """The prompt."""
    prompts: str | None = None
    """JSONL file of prompts."""
    output: str | None = None
    """JSONL file to write, in the order of `prompts`."""
    overwrite: bool = False
    """Replace `output` if it exists."""
    template: bool = False
    """Wrap each plain prompt as a user's message in the model's chat template."""
    chat: bool = False
    """Interactive conversation."""
    system: str | None = None
    """System message of a chat or of templated prompts."""
    policy: str = "auto"
    """fixed:DRAFT,VERIFY: tokens drafted at a time, and survivors the full model waits for. With :now behind it, a
    sequence does not wait for the others of its batch. auto: choose exits and lengths by what they cost here, which is
    measured when a model is first used, and by what is accepted; plain decoding where nothing else is faster."""
    lookup: bool | None = None
    """Propose what followed the last few tokens earlier in the same text; the full model judges it. null: with
    policy=auto, which finds out where it pays. true: with a fixed policy and plain decoding too, wherever something is
    found, before anything is drafted. false: never."""
    max_batch: int = Field(default=8, ge=1)
    """Most sequences decoded at a time."""
    kv_blocks: int | None = Field(default=None, ge=1)
    """KV pool size in blocks of 16 tokens; null: what max_batch requests may need. In a smaller one, requests wait."""
    prefill_chunk: int = Field(default=512, ge=1)
    """Most prompt tokens on their way through the model at a time; others go on between the pieces of a long prompt."""
    dtype: Precision = "auto"
    """auto: as the model is stored."""
    device: str = "auto"
    """auto: cuda where there is one, else cpu."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)
    """GPU: share of its memory to take. What is free of it becomes the KV pool, unless kv_blocks is given."""
    graphs: bool = True
    """GPU: record short passes as CUDA graphs, so that the host does not hold them up."""
    compile: bool = False
    """GPU: compile each layer with torch.compile, which makes short passes faster after a minute or so of compiling."""
    exact: bool = False
    """Bitwise the same output whatever batch, drafts and policy, in bf16 too. Every product gets one fixed row count
    (64 on a GPU, 8 on a CPU) and every token is attended for by itself. Prompts run 64 (8) tokens at a time, and a
    decoding step costs what that many rows cost: little more than one row on a GPU, several times as much on a CPU."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads; null: torch's default."""
    stats: bool = False
    """Print tokens/s, acceptance per level and tokens per full pass to stderr at the end."""


def help_text() -> str:
    """The whole help."""
    return HELP + field_help(DecodeOptions, last=SamplingParams)
