"""Simulated against measured acceptance, and the answers the trunk writes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, build, reference
from train_fixtures import CHAT, config, model_folder, t1

from hispec.attention import PackedAttention
from hispec.config import HeadConfig
from hispec.decode.policy import FixedPolicy
from hispec.errors import DataError
from hispec.heads import make_heads
from hispec.model import HiSpecModel
from hispec.train.answers import Answers
from hispec.train.config import EvalConfig
from hispec.train.data import Document, MicroBatch
from hispec.train.data_config import DataConfig
from hispec.train.evaluate import Evaluation, agreement
from hispec.train.features import compute
from hispec.train.loop import train
from hispec.train.masks import encode_prompt, supervised
from hispec.train.simulate import simulate
from hispec.trunk import Trunk

TEXT = list(range(100, 141))


def untrained(name: str = "llama_gqa", exits: tuple[int, ...] = (2, 4)) -> HiSpecModel:
    """A tiny model with logit-lens heads."""
    trunk = Trunk(build(name))
    heads = make_heads(trunk, exits, [HeadConfig(kind="norm")] * len(exits))
    return HiSpecModel(trunk, t1(size=VOCAB), heads, name)


@pytest.mark.parametrize(("windows", "per_pass"), [((2, 4), 6), ((1, 1), 2), ((3, 8), 8)])
def test_perfect_heads_cost_what_the_formula_says(windows: tuple[int, int], per_pass: int) -> None:
    """Level 1 yields draft + 1 tokens a pass, its bonus included; the full model waits until its window is full."""
    found = simulate([TEXT, TEXT, TEXT], FixedPolicy(3, windows))
    draft, window = windows
    rounds = -(-window // (draft + 1))
    assert found.tokens == 40
    assert per_pass == rounds * (draft + 1)
    assert found.full_passes == -(-40 // per_pass)


def test_useless_heads_cost_a_full_pass_a_token() -> None:
    wrong = [0] * len(TEXT)
    assert simulate([wrong, TEXT], FixedPolicy(2, (1,))).full_passes == 40
    assert simulate([TEXT], FixedPolicy(1)).full_passes == 40
    # A judge that lets everything wrong pass helps nobody, and one that is right repairs the draft.
    assert simulate([wrong, wrong, TEXT], FixedPolicy(3, (2, 4))).full_passes == 40
    assert simulate([wrong, TEXT, TEXT], FixedPolicy(3, (2, 4))).full_passes < 20


@pytest.mark.parametrize("policy", ["fixed:1,1", "fixed:2,4", "fixed:4,8"])
@pytest.mark.parametrize("name", ["llama_gqa", "opt_pre", "gemma2"])
def test_simulated_is_measured_for_untrained_heads(name: str, policy: str) -> None:
    """Logit lenses are often wrong: rejections at every level, and the counts agree to the pass."""
    model = untrained(name, (3, 5))
    settings = EvalConfig(max_new_tokens=40, policy=policy)
    prompts = [[5, 17, 101, 33], [9, 150], [7, 88, 3, 4, 5, 6, 7, 8, 9]]
    found = Evaluation(model, prompts, settings)(model)
    assert found["identical_outputs"] == 1.0
    assert found["simulated_tokens_per_full_pass"] == pytest.approx(found["measured_tokens_per_full_pass"], rel=0.02)


def test_t23_simulated_and_measured_agree_after_training(tmp_path: Path) -> None:
    """Heads overfitted on the trunk's own continuation of one prompt decode that text as fast as training promises."""
    folder = model_folder(tmp_path, "llama_gqa")
    prompt = [1, 7, 8]
    text, _ = reference(build("llama_gqa"), prompt, 60)
    words = t1(size=VOCAB).convert_ids_to_tokens(prompt[1:] + text)
    data = tmp_path / "text.jsonl"
    data.write_text(json.dumps({"text": " ".join(words)}) + "\n")
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "hi there"}\n')
    tokenizer = t1(None, VOCAB)
    tokenizer.save_pretrained(folder)  # without a template, the prompt is the text's own beginning
    (folder / "chat_template.jinja").unlink()
    assert encode_prompt(tokenizer, [{"role": "user", "content": "hi there"}]) == prompt
    settings = config(
        tmp_path, folder, data__source=str(data), data__max_len=100, train__micro_batch_tokens=100,
        train__max_steps=150, train__lr=5e-3,
        eval__prompts=str(held_out), eval__max_new_tokens=60,
    )  # fmt: skip
    found = train(settings)
    assert found["identical_outputs"] == 1.0
    assert found["measured_tokens_per_full_pass"] == pytest.approx(found["simulated_tokens_per_full_pass"], rel=0.1)
    assert found["measured_tokens_per_full_pass"] > 3
    assert all(row["top1"] > 0.8 for row in found["exits"])


PROMPTS = [
    encode_prompt(t1(size=VOCAB), [*CHAT[: n % 2 * 2], {"role": "user", "content": f"hi w{30 + n}"}]) for n in range(6)
]


def settings(**changes: Any) -> DataConfig:
    """Data settings for answers."""
    return DataConfig.build({"prompts": "everyday", "answers": "trunk", "max_new_tokens": 8, "max_len": 64, **changes})


def answered(config: DataConfig, folder: Path) -> list[Document]:
    """The documents of all answers, written by one rank."""
    answers = Answers(untrained(), PROMPTS, config, 0, folder)
    answers.write()
    return answers.documents()


def test_answers_are_the_trunks_own_and_resume(tmp_path: Path) -> None:
    path = tmp_path / "00000.jsonl"
    documents = answered(settings(), tmp_path)
    header, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert header["provenance"].keys() >= {"model", "revision", "dtype", "temperature", "max_new_tokens", "seed"}
    assert len(lines) == len(PROMPTS)
    assert {line["prompt"]: line["prompt_text"] for line in lines} == dict(
        enumerate(map(t1(size=VOCAB).decode, PROMPTS))
    )
    for prompt, document in zip(PROMPTS, documents, strict=True):
        answer, _ = reference(build("llama_gqa"), prompt, 8, stop_ids=[2])
        assert document.ids == prompt + answer
        assert [at for at, mark in enumerate(document.supervised) if mark] == list(
            range(len(prompt) - 1, len(document.ids) - 1)
        )
    # Killed in the middle of a line: whole lines stay, the rest is written again.
    text = path.read_text()
    kept = text.split("\n")[:3]
    path.write_text("\n".join(kept) + '\n{"prompt": 3, "sam')
    assert answered(settings(), tmp_path) == documents
    assert path.read_text().split("\n")[:3] == kept
    assert sorted(path.read_text().split("\n")) == sorted(text.split("\n"))


def test_ranks_share_the_answers_and_others_go_on_with_them(tmp_path: Path) -> None:
    alone = answered(settings(samples=2, temperature=1.0), tmp_path / "alone")
    shared = Answers(untrained(), PROMPTS, settings(samples=2, temperature=1.0), 0, tmp_path / "shared")
    shared.write(0, 2)
    shared.write(1, 2)
    files = sorted((tmp_path / "shared").iterdir())
    assert [len(path.read_text().splitlines()) for path in files] == [7, 7]  # a header and six answers each
    assert shared.documents() == alone
    # Two of three ranks were killed; one alone, or three others, write only what is missing.
    files[1].write_text("\n".join(files[1].read_text().split("\n")[:3]) + "\n")
    before = files[0].read_text()
    for rank in range(3):
        shared.write(rank, 3)
    assert shared.documents() == alone
    assert files[0].read_text().startswith(before)
    assert sum(len(path.read_text().splitlines()) - 1 for path in (tmp_path / "shared").iterdir()) == 12


def test_sampled_answers_do_not_depend_on_where_a_run_was_stopped(tmp_path: Path) -> None:
    path = tmp_path / "00000.jsonl"
    sampled = settings(samples=2, temperature=1.0, answer_batch=4)
    documents = answered(sampled, tmp_path)
    assert len(documents) == 2 * len(PROMPTS)
    assert documents[0].ids != documents[1].ids
    path.write_text("\n".join(path.read_text().split("\n")[:4]) + "\n")
    assert answered(sampled, tmp_path) == documents


def test_answers_of_other_settings_are_not_mixed_in(tmp_path: Path) -> None:
    answered(settings(), tmp_path)
    with pytest.raises(DataError, match="max_new_tokens=8, this run has 9"):
        answered(settings(max_new_tokens=9), tmp_path)


def test_acceptance_is_the_share_that_sampling_would_accept() -> None:
    """A head that is the full model agrees everywhere; sum min(p, q) is 1."""
    model = untrained(exits=(5,))
    head = model.heads_list[0]
    trunk = model.trunk
    with torch.no_grad():
        # Layer 6 does nothing, so exit 5 with the final norm is the full model.
        for parameter in trunk.layers[5].parameters():
            parameter.zero_()
    assert head.exit == 5
    evaluation = Evaluation(model, [[5, 17, 101]], EvalConfig(max_new_tokens=20, policy="fixed:4"))
    found = evaluation(model)
    (row,) = found["exits"]
    assert row["top1"] == 1.0 and row["acceptance"] == pytest.approx(1.0, abs=1e-5)
    n = len(evaluation.answers[0].ids) - 1  # the first token is the prompt's own
    assert found["measured_tokens_per_full_pass"] == pytest.approx(n / -(-n // 5))


@torch.no_grad()
def test_tokens_know_whose_choice_they_were() -> None:
    """What a level is said to have chosen is what its head says, asked on the finished text."""
    model = untrained("llama_gqa", (3, 5))
    evaluation = Evaluation(model, [[5, 17, 101, 33], [9, 150]], EvalConfig(max_new_tokens=40))
    judges = evaluation(model)["judges"]
    chosen: list[int] = []
    for completion in evaluation.decoded:
        marks = supervised([False] * len(completion.prompt_ids) + [True] * len(completion.ids))
        batch = MicroBatch((Document(completion.prompt_ids + completion.ids, marks),))
        features = compute(model.trunk, model.exits, batch)
        picks = []
        for head in model.heads_list:
            state_TD = head.features(
                features.hidden[head.exit], batch.ids_T, batch.positions_T, PackedAttention(batch.lengths)
            )
            picks.append(agreement(head, state_TD[batch.rows_S], features.truth)[2])
        said = [*picks, completion.ids]
        assert len(completion.chosen_by) == len(completion.ids)
        assert all(said[level][at] == completion.ids[at] for at, level in enumerate(completion.chosen_by))
        chosen += completion.chosen_by
    assert set(chosen) == {0, 1, 2}
    # What the full model let stand was chosen below it.
    assert sum(level < 2 for level in chosen) == sum(judges[1]["accepted_at"])
    for judge in judges:
        judged, accepted = judge["judged_at"], judge["accepted_at"]
        assert judge["accepted"] == sum(accepted) / sum(judged)
        # Whoever is judged at a place was preceded by one that stood.
        assert all(n <= before for n, before in zip(judged[1:], accepted, strict=False))
    assert len(judges[0]["judged_at"]) == 2  # two drafts to a round
