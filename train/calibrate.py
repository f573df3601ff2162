"""`exits=auto`: where heads pay on this model, this data and this machine, found out before training.

    documents    [ held apart | learned from ]      the trunk runs over both, once
    candidates   2   4   5   7   8   10 ...         at each a head of the recipe's kind, the same few steps for all
    agreement    of each with the full model and with those above it, on what was held apart
    costs        of passes through every span between candidates, by rows

A quick head agrees less often than one that has been trained to the end: what is compared is places. Where `heads`
lists several kinds, the first stands for all: what the others cost more or less, they do at every place.

Letters: S supervised positions held apart.
"""

import bisect
import itertools
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from hispec.attention import PackedAttention
from hispec.config import HeadConfig
from hispec.decode.blocks import blocks_for
from hispec.decode.costs import CONTEXT, measure
from hispec.decode.hierarchy import make_cache
from hispec.decode.level import Level
from hispec.errors import DataError, FileError
from hispec.heads import FullHead, Head
from hispec.linear import prepack, quicken, unpack
from hispec.train import budget, ranks
from hispec.train.checkpoints import settings
from hispec.train.choice import Choice, Cost, choose
from hispec.train.config import TrainConfig
from hispec.train.data import Document, MicroBatch, pack
from hispec.train.evaluate import agreement
from hispec.train.features import Features, compute
from hispec.train.lessons import step_losses
from hispec.train.schedule import learning_rate
from hispec.train.student import Student
from hispec.trunk import Trunk

log = logging.getLogger("hispec")
FILE = "exits.json"
# Tokens of a step, where documents are no longer: many small steps learn more than few large ones.
STEP = 512
ROWS = (1, 2, 4, 8, 16)

Seen = list[tuple[MicroBatch, Features]]


def choose_exits(trunk: Trunk, batches: Sequence[MicroBatch], config: TrainConfig, vocab_ids: Tensor | None) -> Choice:
    """The exits of a run, the same on all ranks: those chosen before in its folder, else by calibration.

    `vocab_ids`: the tokens of the first kind of head in the recipe, as `Head` takes them.

    Raises:
        DataError: there is only one document. FileError: the choice cannot be written.
    """
    path = Path(config.run_dir) / FILE
    kept: Choice | None = ranks.from_first(_kept(path, config) if ranks.rank() == 0 else None)
    if kept is not None:
        return kept
    # Where ranks run the trunk together, all of them calibrate; they may differ in rounding, so the first one decides.
    made = calibrate(trunk, batches, config, vocab_ids) if trunk.in_step or ranks.rank() == 0 else None
    choice: Choice = ranks.from_first(made)
    if ranks.rank() == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_suffix(".new")
            new.write_text(json.dumps({"choice": choice.model_dump(), "settings": settings(config)}, indent=2) + "\n")
            new.replace(path)
        except OSError as error:
            raise FileError(f"cannot write {path}: {error.strerror}; free space or give another run_dir") from None
    return choice


def _kept(path: Path, config: TrainConfig) -> Choice | None:
    """What was chosen before, with the same settings."""
    if config.resume == "never":
        return None
    try:
        kept = json.loads(path.read_text())
        if kept["settings"] == settings(config):
            return Choice.build(kept["choice"])
        log.info("%s was chosen with other settings; calibrating again", path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, LookupError, TypeError):
        log.warning("%s is damaged; calibrating again", path)
    return None


def calibrate(trunk: Trunk, batches: Sequence[MicroBatch], config: TrainConfig, vocab_ids: Tensor | None) -> Choice:
    """Teach a quick head at every candidate, measure heads and passes, and choose. Raises DataError as `split`."""
    candidates, kind = config.candidates_for(trunk.n_layers), (config.heads or [config.head])[0]
    size = max(STEP, config.data.max_len)
    learned, apart = (
        [(batch, compute(trunk, candidates, batch)) for batch in pack(documents, size, config.train.seed)]
        for documents in split(batches, config.calibration.tokens)
    )
    heads: list[Head] = []
    picks: dict[int | None, Tensor] = {None: torch.cat([features.truth.argmax_S for _, features in apart]).cpu()}
    for exit_ in tqdm(candidates, desc="calibrate", unit="exit", disable=True if ranks.rank() else None):
        torch.manual_seed(config.train.seed)
        head = Head(trunk, exit_, kind, len(heads), vocab_ids)
        teach(head, learned, config)
        picks[exit_] = _picks(head, apart)
        if not trunk.in_step:
            heads.append(head)
        trunk.forget()
    return choose(
        candidates,
        trunk.n_layers,
        None if config.heads is None else len(config.heads),
        lambda low, high: float((picks[low] == picks[high]).float().mean()),
        reckoned(trunk, kind) if trunk.in_step else measured(trunk, heads),
        seconds=not trunk.in_step,
    )


def split(batches: Sequence[MicroBatch], tokens: int) -> tuple[list[Document], list[Document]]:
    """Documents of about `tokens` tokens, and others of a quarter as many; in proportion where there are fewer.

    Raises:
        DataError: there is only one document.
    """
    documents = [document for batch in batches for document in batch.documents]  # shuffled, as they were packed
    ends = list(itertools.accumulate(len(document.ids) for document in documents))
    n = min(max(2, 1 + bisect.bisect_left(ends, tokens + tokens // 4)), len(documents))
    n_apart = min(1 + bisect.bisect_left(ends, ends[n - 1] // 5), n - 1)
    if not n_apart:
        raise DataError(
            "exits=auto needs two documents, one to measure on, and there is one; give more, or exits=[4,8]"
        )
    return documents[n_apart:n], documents[:n_apart]


def teach(head: Head, learned: Seen, config: TrainConfig) -> None:
    """Train a head by the recipe's losses and schedule, in few steps; it ends up in the trunk's precision again."""
    trunk, train, steps = head.trunk, config.train, config.calibration.steps
    student = Student(nn.ModuleList([head.float()]))
    if trunk.dtype == torch.float32:
        quicken(student)
    trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, train.lr, train.betas, weight_decay=train.weight_decay)
    for step in range(steps):
        batch, features = learned[step % len(learned)]
        ids_T, positions_T, rows_S = (x.to(trunk.device) for x in (batch.ids_T, batch.positions_T, batch.rows_S))
        with torch.autocast(trunk.device.type, torch.bfloat16, enabled=trunk.dtype == torch.bfloat16):
            hidden = {head.exit: features.hidden[head.exit].float()}
            readings = student(hidden, ids_T, positions_T, rows_S, batch.lengths)
        loss = step_losses([head], readings, features.truth, train.loss, step / max(1, steps - 1)).loss
        optimizer.zero_grad()
        (loss / len(rows_S)).backward()  # type: ignore[no-untyped-call]
        if train.clip:
            nn.utils.clip_grad_norm_(trained, train.clip)
        optimizer.param_groups[0]["lr"] = learning_rate(train, step, steps)
        optimizer.step()
    unpack(student.modules())
    head.to(trunk.dtype)


@torch.no_grad()
def _picks(head: Head, apart: Seen) -> Tensor:
    """The head's greedy tokens [S]."""
    found: list[int] = []
    for batch, features in apart:
        ids_T, positions_T, rows_S = (x.to(head.trunk.device) for x in (batch.ids_T, batch.positions_T, batch.rows_S))
        state_TD = head.features(features.hidden[head.exit], ids_T, positions_T, PackedAttention(batch.lengths))
        found += agreement(head, state_TD[rows_S], features.truth)[2]
    return torch.tensor(found)


def measured(trunk: Trunk, heads: Sequence[Head]) -> Cost:
    """Seconds of passes on this machine, of a sequence alone; measured as `policy=auto` does."""
    ends: list[Head | FullHead] = [*heads, FullHead(trunk)]
    spans = [(start, end) for end in ends for start in (0, *(head.exit for head in heads)) if start < end.exit]
    levels = {(start, end.exit): Level(0, trunk, start, end.exit, end) for start, end in spans}
    prepack(heads)
    cache = make_cache(list(levels.values()), blocks_for(CONTEXT + ROWS[-1]))
    costs = measure(list(levels.values()), cache, 1, ROWS)
    trunk.forget()
    return lambda start, stop, rows, read: costs.of(levels[start, stop], rows, read)


def reckoned(trunk: Trunk, kind: HeadConfig) -> Cost:
    """Weights that a pass reads, for a sharded trunk: there passes gather layers, which in decoding they never do."""
    shape = budget.Shape.of(trunk.model.config)
    own = budget.trained(kind.model_copy(update={"unembedding": "shared"}), shape)

    def cost(start: int, stop: int, rows: int, read: bool) -> float:
        full = stop == trunk.n_layers
        vocab = shape.vocab if full else kind.vocab_size or shape.vocab
        return (stop - start) * shape.n_layer + (0 if full else own) + read * vocab * shape.hidden

    return cost
