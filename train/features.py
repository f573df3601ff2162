"""What the frozen trunk computes for a micro batch, once, and kept on disk.

Letters: T tokens of a micro batch, S supervised positions among them, D hidden size.
"""

import contextlib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hispec.attention import PackedAttention
from hispec.errors import FileError
from hispec.train import ranks
from hispec.train.data import MicroBatch
from hispec.train.losses import Truth
from hispec.trunk import Trunk


@dataclass(frozen=True)
class Features:
    """The hidden state [T, D] at each exit, and what the full model says at the supervised positions."""

    hidden: dict[int, Tensor]
    truth: Truth


@torch.no_grad()
def compute(trunk: Trunk, exits: Sequence[int], batch: MicroBatch, chunk: int = 256) -> Features:
    """Run the trunk once, span by span; logits exist for `chunk` positions at a time, in float32 for fewer."""
    device = trunk.device
    ids_T, positions_T, rows_S = (x.to(device) for x in (batch.ids_T, batch.positions_T, batch.rows_S))
    attend = PackedAttention(batch.lengths)
    hidden: dict[int, Tensor] = {}
    state_TD: Tensor | None = None
    start = 0
    for stop in (*exits, trunk.n_layers):
        state_TD = hidden[stop] = trunk.run(ids_T, positions_T, start, stop, attend, state_TD)
        start = stop
    final_SD = trunk.features(hidden.pop(trunk.n_layers)[rows_S])
    ends = []
    for part_CD in torch.split(final_SD, chunk):
        # A few rows at a time stay in a processor's caches, which is three times as fast.
        for logits_CV in torch.split(trunk.unembed(part_CD), chunk if device.type != "cpu" else 16):
            logits_CV = logits_CV.float()
            ends.append((logits_CV.logsumexp(-1), logits_CV.argmax(-1)))
    logsumexp_S = torch.cat([end[0] for end in ends])
    argmax_S = torch.cat([end[1] for end in ends])
    return Features(hidden, Truth(final_SD, logsumexp_S, argmax_S, batch.targets_S.to(device)))


class FeatureCache:
    """Features by what they were computed from, so that no change of data, template, exits or trunk meets old ones.

    A file's name: sha256(some of the trunk's weights | exits | dtype | ids, lengths, mask).safetensors
    """

    def __init__(self, folder: Path | None, trunk: Trunk, exits: Sequence[int]) -> None:
        """`folder` None keeps nothing: every call runs the trunk."""
        self.folder, self.trunk, self.exits = folder, trunk, tuple(exits)
        sha = hashlib.sha256(f"{self.exits} {trunk.dtype}".encode())
        # Some values of every weight tell trunks apart, and need not be computed.
        for name, weight in trunk.weights():
            values_N = weight.detach().flatten()[:: max(1, weight.numel() // 256)]
            sha.update(f"{name} {tuple(weight.shape)}".encode() + values_N.float().cpu().numpy().tobytes())
        self._salt = sha.digest()
        self.misses = 0

    def get(self, batch: MicroBatch) -> Features:
        """Features of a batch, read or computed.

        Raises:
            FileError: the cache cannot be written.
        """
        path = None if self.folder is None else self.folder / f"{self.key(batch)}.safetensors"
        found = None
        if path is not None and path.is_file():
            with contextlib.suppress(SafetensorError):  # a damaged file is computed again and replaced
                found = self._read(path, batch)
        # Where ranks run the trunk together, what one of them lacks all compute.
        if ranks.largest(int(found is None)) if self.trunk.in_step else found is None:
            features = compute(self.trunk, self.exits, batch)
        if found is not None:
            return found
        self.misses += 1
        if path is not None:
            self._write(path, features)
        return features

    def key(self, batch: MicroBatch) -> str:
        """Name of everything the features of `batch` depend on."""
        content = f"{batch.ids_T.tolist()} {batch.lengths} {batch.rows_S.tolist()}"
        return hashlib.sha256(self._salt + content.encode()).hexdigest()[:32]

    def prune(self, batches: Sequence[MicroBatch]) -> None:
        """Remove what earlier settings of this run, and writes that were interrupted, left behind.

        For all ranks to call: the first one removes, and the others, whose next files it would take for such, wait.
        """
        if ranks.rank() == 0 and self.folder is not None and self.folder.is_dir():
            kept = {f"{self.key(batch)}.safetensors" for batch in batches}
            for path in self.folder.iterdir():
                if path.name not in kept:
                    path.unlink()
        ranks.meet()

    def _read(self, path: Path, batch: MicroBatch) -> Features:
        device = self.trunk.device
        tensors = load_file(path, device=str(device))
        hidden = {exit_: tensors[f"hidden.{exit_}"] for exit_ in self.exits}
        return Features(
            hidden, Truth(tensors["final"], tensors["logsumexp"], tensors["argmax"], batch.targets_S.to(device))
        )

    def _write(self, path: Path, features: Features) -> None:
        truth = features.truth
        tensors = {f"hidden.{exit_}": value for exit_, value in features.hidden.items()}
        tensors |= {"final": truth.final_SD, "logsumexp": truth.logsumexp_S, "argmax": truth.argmax_S}
        # Under its name only when complete; the process id keeps ranks apart.
        new = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: value.contiguous() for name, value in tensors.items()}, new)
            new.replace(path)
        except (OSError, SafetensorError) as error:
            raise FileError(
                f"cannot write features to {path.parent}: {error}; free space or give data.cache=false"
            ) from None
