"""The chunked loss against its dense twin, and the dense one against its definition."""

import pytest
import torch
from torch import Tensor, nn

from hispec.train.config import LossConfig
from hispec.train.losses import METRICS, Truth, dense_loss, head_loss

S, D, V = 23, 16, 50
IDS = torch.tensor([0, 3, 4, 9, 17, 18, 30, 42, 49])


def example(reduced: bool) -> tuple[Tensor, Truth, nn.Linear, Tensor | None]:
    """Features of a head, what the full model says, the shared unembedding, and the head's vocabulary."""
    generator = torch.Generator().manual_seed(0)
    features_SD, final_SD = (torch.randn(S, D, generator=generator) for _ in range(2))
    full = nn.Linear(D, V, bias=False).requires_grad_(False)
    full.weight.copy_(torch.randn(V, D, generator=generator))
    logits_SV = full(final_SD)
    targets_S = torch.randint(0, V, (S,), generator=generator)
    targets_S[-1] = -1
    truth = Truth(final_SD, logits_SV.logsumexp(-1), logits_SV.argmax(-1), targets_S)
    if not reduced:
        return features_SD.requires_grad_(), truth, full, None
    rows = nn.Linear(D, len(IDS), bias=False).requires_grad_(False)
    rows.weight.copy_(full.weight[IDS])
    return features_SD.requires_grad_(), truth, rows, IDS


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 23, 100])
@pytest.mark.parametrize(
    "weights", [{"kl": 1.0}, {"kl": 0.0, "ce": 1.0}, {"kl": 0.3, "ce": 0.5, "acceptance": 2.0, "temperature": 1.7}]
)
def test_chunked_is_dense(reduced: bool, chunk: int, weights: dict[str, float]) -> None:
    features_SD, truth, unembed, vocab_ids = example(reduced)
    config = LossConfig.build({**weights, "chunk": chunk})
    dense = dense_loss(features_SD, truth, unembed, vocab_ids, config)
    (expected_SD,) = torch.autograd.grad(dense.loss * 0.37, features_SD)
    chunked = head_loss(features_SD, truth, unembed, vocab_ids, config)
    (got_SD,) = torch.autograd.grad(chunked.loss * 0.37, features_SD)
    assert torch.allclose(chunked.loss, dense.loss, rtol=1e-5)
    assert torch.allclose(chunked.sums_M, dense.sums_M, rtol=1e-5)
    assert torch.allclose(got_SD, expected_SD, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("reduced", [False, True])
def test_definitions(reduced: bool) -> None:
    """KL, cross-entropy and acceptance, written out token by token."""
    features_SD, truth, unembed, vocab_ids = example(reduced)
    q_SV = unembed(features_SD.detach()).softmax(-1)
    restricted_SV = unembed(truth.final_SD)
    p_SV, true_SV = restricted_SV.softmax(-1), (restricted_SV - truth.logsumexp_S[:, None]).exp()
    ids = list(range(V)) if vocab_ids is None else vocab_ids.tolist()
    ce = -sum(q_SV[s, ids.index(t)].log() for s, t in enumerate(truth.targets_S.tolist()) if t in ids)
    top1 = sum(ids[int(q_SV[s].argmax())] == int(truth.argmax_S[s]) for s in range(S))
    got = dict(
        zip(METRICS, dense_loss(features_SD, truth, unembed, vocab_ids, LossConfig()).sums_M.tolist(), strict=True)
    )
    assert got["kl"] == pytest.approx(float((p_SV * (p_SV / q_SV).log()).sum()), rel=1e-4)
    assert got["ce"] == pytest.approx(float(ce), rel=1e-5)
    assert got["acceptance"] == pytest.approx(float(torch.minimum(true_SV, q_SV).sum()), rel=1e-5)
    assert got["top1"] == top1


def test_the_full_model_itself_is_at_the_minimum() -> None:
    _, truth, unembed, _ = example(False)
    features_SD = truth.final_SD.clone().requires_grad_()
    config = LossConfig(kl=1.0, acceptance=1.0)
    loss = head_loss(features_SD, truth, unembed, None, config)
    assert loss.loss.item() == pytest.approx(0.0, abs=1e-4)
    assert dict(zip(METRICS, loss.sums_M.tolist(), strict=True))["acceptance"] == pytest.approx(S, abs=1e-4)


def test_t20_no_more_than_a_chunk_of_logits_exists() -> None:
    """Peak: every call of the unembedding sees at most `chunk` rows."""
    features_SD, truth, unembed, _ = example(False)
    seen: list[int] = []

    def counting(part_CD: Tensor) -> Tensor:
        seen.append(len(part_CD))
        result: Tensor = unembed(part_CD)
        return result

    head_loss(features_SD, truth, counting, None, LossConfig(chunk=7)).loss.backward()  # type: ignore[no-untyped-call]
    assert max(seen) == 7 and sum(seen) == 2 * S
