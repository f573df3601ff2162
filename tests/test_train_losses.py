"""The chunked loss against its dense twin, the dense one against its definition, and memory against its bound."""

import dataclasses
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hispec.errors import ConfigError
from hispec.heads import Reading
from hispec.train.losses import LOSSES, METRICS, Lesson, Pair, Teacher, Truth, dense_loss, on_vocabulary, step_loss
from hispec.train.optim_config import LossConfig

S, D, V, R = 23, 16, 50, 3
IDS = torch.tensor([0, 3, 4, 9, 17, 18, 30, 42, 49])
MIXES: list[dict[str, float]] = [
    {name: 1.0} for name in LOSSES
] + [{"kl": 0.3, "ce": 0.5, "acceptance": 2.0}]  # fmt: skip


class Example:
    """A head's features, what the full model says, the shared unembedding, and a next level."""

    def __init__(self, reduced: bool, kind: str = "shared") -> None:
        generator = torch.Generator().manual_seed(0)
        features_SD, final_SD, self.next_SD = (torch.randn(S, D, generator=generator) for _ in range(3))
        self.weight_VD = torch.randn(V, D, generator=generator)
        targets_S = torch.randint(0, V, (S,), generator=generator)
        targets_S[-1] = -1
        logits_SV = final_SD @ self.weight_VD.T
        self.truth = Truth(final_SD, logits_SV.logsumexp(-1), logits_SV.argmax(-1), targets_S)
        self.ids = IDS if reduced else None
        self.rows_VD = self.weight_VD[IDS] if reduced else self.weight_VD
        parts: dict[str, tuple[Tensor | None, ...]] = {
            "shared": (None, None),
            "lora": (torch.randn(S, R, generator=generator), torch.randn(R, len(self.rows_VD), generator=generator)),
            "copied": (None, torch.randn(self.rows_VD.shape, generator=generator)),
        }
        self.reading = Reading(features_SD, *parts[kind])
        for part in self.leaves:
            part.requires_grad_()

    @property
    def leaves(self) -> list[Tensor]:
        return [part for part in self.reading if part is not None]

    def full(self, final_CD: Tensor) -> Tensor:
        return final_CD @ self.rows_VD.T

    def read(self, reading: Reading) -> Tensor:
        if reading.matrix is None:
            return self.full(reading.features_SD)
        if reading.low_SR is None:
            return reading.features_SD @ reading.matrix.T
        return self.full(reading.features_SD) + reading.low_SR @ reading.matrix

    def next_level(self, start: int, stop: int) -> Tensor:
        return self.full(self.next_SD[start:stop]).log_softmax(-1)

    def lesson(self, weights: Mapping[str, float] | None = None, **more: Any) -> Lesson:
        return Lesson(self.read, self.full, self.ids, weights or {"kl": 1.0}, self.next_level, **more)


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 100])
@pytest.mark.parametrize("weights", MIXES, ids=lambda mix: "+".join(mix))
@pytest.mark.parametrize(("kind", "share"), [("shared", 0.0), ("lora", 0.3), ("copied", 1.0)])
def test_chunked_is_dense(reduced: bool, chunk: int, weights: dict[str, float], kind: str, share: float) -> None:
    example = Example(reduced, kind)
    lesson = example.lesson(weights, share=share, temperature=1.7, chunk=chunk)
    dense, metrics_M = dense_loss(example.reading, example.truth, lesson)
    expected = torch.autograd.grad(dense * 0.37, example.leaves)
    chunked = step_loss([example.reading], example.truth, [lesson])
    got = torch.autograd.grad(chunked.loss * 0.37, example.leaves)
    assert torch.allclose(chunked.loss, dense, rtol=1e-5)
    assert torch.allclose(chunked.sums_HM[0], metrics_M, rtol=1e-5)
    for ours, dull in zip(got, expected, strict=True):
        assert torch.allclose(ours, dull, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_its_formula(name: str, reduced: bool) -> None:
    """Written out token by token, in double precision."""
    example = Example(reduced)
    lesson = example.lesson({name: 1.0})
    q_SV = example.read(example.reading).detach().double().softmax(-1)
    restricted_SV = example.full(example.truth.final_SD).double()
    p_SV, true_SV = restricted_SV.softmax(-1), (restricted_SV - example.truth.logsumexp_S[:, None]).exp()
    ids = list(range(V)) if example.ids is None else example.ids.tolist()
    targets, m_SV = example.truth.targets_S.tolist(), (p_SV + q_SV) / 2
    accepted_S = torch.minimum(true_SV, q_SV).sum(-1)
    # The head never says what is not in its vocabulary: all of that mass is a difference.
    lost_S = 1.0 - true_SV.sum(-1)
    wanted = {
        "ce": -sum(float(q_SV[s, ids.index(t)].log()) for s, t in enumerate(targets) if t in ids),
        "kl": float((p_SV * (p_SV / q_SV).log()).sum()),
        "reverse_kl": float((q_SV * (q_SV / p_SV).log()).sum()),
        "jsd": float((p_SV * (p_SV / m_SV).log()).sum() + (q_SV * (q_SV / m_SV).log()).sum()) / 2,
        "tv": float(((true_SV - q_SV).abs().sum(-1) + lost_S).sum() / 2),
        "acceptance": float(-accepted_S.log().sum()),
    }  # fmt: skip
    loss, metrics_M = dense_loss(example.reading, example.truth, lesson)
    assert float(loss.detach()) == pytest.approx(wanted[name], rel=1e-4)
    metrics = dict(zip(METRICS, metrics_M.tolist(), strict=True))
    assert metrics["loss"] == pytest.approx(wanted[name], rel=1e-4)
    assert metrics["kl"] == pytest.approx(wanted["kl"], rel=1e-4)
    assert metrics["ce"] == pytest.approx(wanted["ce"], rel=1e-4)
    assert metrics["acceptance"] == pytest.approx(float(accepted_S.sum()), rel=1e-4)
    picks = [ids[int(at)] for at in q_SV.argmax(-1)]
    assert metrics["top1"] == sum(a == b for a, b in zip(picks, example.truth.argmax_S.tolist(), strict=True))


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_the_teacher_may_be_the_next_level_or_a_mix(share: float) -> None:
    example = Example(False)
    loss, metrics_M = dense_loss(example.reading, example.truth, example.lesson(share=share))
    p_SV = (1 - share) * example.full(example.truth.final_SD).softmax(-1)
    p_SV = p_SV + share * example.full(example.next_SD).softmax(-1)
    q_SV = example.read(example.reading).detach().softmax(-1)
    assert float(loss.detach()) == pytest.approx(float((p_SV * (p_SV / q_SV).log()).sum()), rel=1e-4)
    _, plain_M = dense_loss(example.reading, example.truth, example.lesson())
    assert torch.equal(metrics_M[1:], plain_M[1:])  # what is reported is against the full model, always


def test_heads_of_one_vocabulary_share_the_teacher_and_change_nothing() -> None:
    reduced, whole = Example(True), Example(False, "copied")
    other = Reading(torch.randn(S, D, requires_grad=True))
    readings = [reduced.reading, other, whole.reading]
    asked: list[int] = []

    def counting(final_CD: Tensor) -> Tensor:
        asked.append(len(final_CD))
        return reduced.full(final_CD)

    lessons = [reduced.lesson(chunk=9), reduced.lesson({"tv": 1.0}, chunk=9), whole.lesson(chunk=9, vocabulary=2)]
    lessons[:2] = [dataclasses.replace(lesson, full=counting) for lesson in lessons[:2]]
    leaves = [*reduced.leaves, other.features_SD, *whole.leaves]
    found = step_loss(readings, reduced.truth, lessons)
    got = torch.autograd.grad(found.loss, leaves)
    assert sum(asked) == S  # once, for two heads
    alone = [dense_loss(*each) for each in zip(readings, [reduced.truth] * 3, lessons, strict=True)]
    expected = torch.autograd.grad(torch.stack([loss for loss, _ in alone]).sum(), leaves)
    assert torch.allclose(found.sums_HM, torch.stack([metrics_M for _, metrics_M in alone]), rtol=1e-5)
    assert all(torch.allclose(ours, dull, rtol=1e-4, atol=1e-6) for ours, dull in zip(got, expected, strict=True))


def test_levels_of_other_vocabularies_are_told_on_ones_own() -> None:
    log_CV = torch.randn(4, V).log_softmax(-1)
    own = log_CV[:, IDS].log_softmax(-1)
    wanted = torch.tensor([3, 5, 49])
    told = on_vocabulary(own, IDS, wanted, V).exp()
    assert torch.equal(told[:, 0], own[:, 1].exp()) and torch.equal(told[:, 2], own[:, 8].exp())
    assert not told[:, 1].any()
    assert torch.equal(on_vocabulary(log_CV, None, wanted, V), log_CV[:, wanted])
    whole = on_vocabulary(own, IDS, None, V).exp()
    assert whole.shape == (4, V) and torch.allclose(whole.sum(-1), torch.ones(4))


def test_weights_move_from_the_first_mix_to_the_last() -> None:
    config = LossConfig.build({"kl": 1.0, "final": {"acceptance": 2.0}})
    assert config.weights_at(0.0) | {} == config.weights()
    half = config.weights_at(0.5)
    assert (half["kl"], half["acceptance"], half["ce"]) == (0.5, 1.0, 0.0)
    assert config.weights_at(1.0) == config.final.weights() if config.final else False
    with pytest.raises(ConfigError, match="nothing to learn"):
        LossConfig.build({"final": {"kl": 0.0}})


def test_the_full_model_itself_is_at_the_minimum() -> None:
    example = Example(False)
    reading = Reading(example.truth.final_SD.clone().requires_grad_())
    for name in ("kl", "reverse_kl", "jsd", "tv", "acceptance"):
        found = step_loss([reading], example.truth, [example.lesson({name: 1.0})])
        assert found.loss.item() == pytest.approx(0.0, abs=1e-4)
        assert dict(zip(METRICS, found.sums_HM[0].tolist(), strict=True))["acceptance"] == pytest.approx(S, abs=1e-4)


def test_t20_no_more_than_a_chunk_of_logits_exists() -> None:
    """Every call of the unembedding sees at most `chunk` rows."""
    example = Example(False)
    seen: list[int] = []

    def counting(part_CD: Tensor) -> Tensor:
        seen.append(len(part_CD))
        return part_CD @ example.weight_VD.T

    lesson = Lesson(lambda reading: counting(reading.features_SD), counting, None, {"kl": 1.0}, chunk=7)
    step_loss([example.reading], example.truth, [lesson]).loss.backward()  # type: ignore[no-untyped-call]
    assert max(seen) == 7 and sum(seen) == 2 * S


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_t20_peak_memory_does_not_depend_on_the_number_of_heads() -> None:
    """V = 50k, two documents of 512, half of the tokens supervised: four heads need hardly more than one."""
    peaks = []
    for n_heads in (1, 4):
        words = [sys.executable, "-c", f"import test_train_losses as t; t.peak({n_heads})"]
        done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=__file__.rpartition("/")[0])
        peaks.append(int(done.stdout))
    assert 0 < peaks[1] < 1.6 * peaks[0]


def peak(n_heads: int) -> None:
    """Print by how many kilobytes the process grows over a step of `n_heads`."""
    unembed = nn.Linear(64, 50_000, bias=False).requires_grad_(False)
    final_SD = torch.randn(512, 64)
    truth = Truth(
        final_SD, torch.full((512,), 12.0), torch.zeros(512, dtype=torch.long), torch.ones(512, dtype=torch.long)
    )
    lesson = Lesson(lambda reading: unembed(reading.features_SD), unembed, None, {"kl": 1.0}, chunk=64)
    before = most_memory()
    readings = [Reading(torch.randn(512, 64, requires_grad=True)) for _ in range(n_heads)]
    step_loss(readings, truth, [lesson] * n_heads).loss.backward()  # type: ignore[no-untyped-call]
    print(most_memory() - before)


def most_memory() -> int:
    """Kilobytes this process ever had; getrusage would count those of the process that started it."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1])


def test_t21_losses_of_bf16_logits_are_taken_in_float32() -> None:
    example = Example(False)
    weight_VD = example.weight_VD.bfloat16()
    final_SD = example.truth.final_SD.bfloat16()
    logits_SV = (final_SD @ weight_VD.T).float()
    truth = Truth(final_SD, logits_SV.logsumexp(-1), logits_SV.argmax(-1), example.truth.targets_S)
    reading = Reading(example.reading.features_SD.detach().bfloat16().requires_grad_())
    lesson = Lesson(lambda r: r.features_SD @ weight_VD.T, lambda x: x @ weight_VD.T, None, {"kl": 1.0, "ce": 0.5})
    found = step_loss([reading], truth, [lesson])
    assert found.loss.dtype == torch.float32
    q_SV = (reading.features_SD.detach() @ weight_VD.T).double().log_softmax(-1)
    p_SV = logits_SV.double().log_softmax(-1)
    kl = (p_SV.exp() * (p_SV - q_SV)).sum()
    ce = -q_SV[:-1].gather(1, truth.targets_S[:-1, None]).sum()
    assert float(found.loss.detach()) == pytest.approx(float(kl + 0.5 * ce), rel=1e-5)
    pair = Pair(logits_SV, Teacher(logits_SV - truth.logsumexp_S[:, None]), truth.targets_S, None)
    assert {x.dtype for x in (pair.log_p_CV, pair.true_log_q_CV, pair.accepted_C)} == {torch.float32}
