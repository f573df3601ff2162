"""exits=auto: what promises most is chosen, once for a run, and the reason goes along with the heads."""

import gc
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from several_ranks import in_ranks
from train_fixtures import config, digest, losses, model_folder

from hispec.config import HeadConfig
from hispec.errors import ConfigError, DataError
from hispec.heads import Head
from hispec.model import HiSpecModel
from hispec.train import calibrate, setup
from hispec.train.choice import Agreement, Choice, Cost, choose
from hispec.train.cli import run
from hispec.train.config import TrainConfig
from hispec.train.data import Document, MicroBatch
from hispec.train.features import compute
from hispec.train.loop import train

QUICK = {"exits": "auto", "calibration__steps": 2}
N_LAYERS = 12


def agreeing(known: Mapping[int, float], with_deeper: float = 0.9) -> Agreement:
    return lambda low, high: known[low] if high is None else with_deeper


def layers(per_head: float, per_layer: float = 1.0) -> Cost:
    """A machine on which rows cost nothing: a pass costs its layers, and its logits if they are read."""
    return lambda start, stop, rows, read: (stop - start) * per_layer + read * per_head


# What promises most, of known candidates.


def test_the_candidate_that_is_clearly_best_is_chosen(caplog: pytest.LogCaptureFixture) -> None:
    known = {1: 0.1, 2: 0.2, 3: 0.9, 6: 0.91, 8: 0.92}
    with caplog.at_level(logging.INFO, "hispec"):
        choice = choose(list(known), N_LAYERS, 1, agreeing(known), layers(per_head=0.1, per_layer=0.01), True)
    assert choice.exits == [3]
    assert "exit 3 is expected at" in choice.reason and "5 choices of 1 among 5 candidates" in choice.reason
    row = next(row for row in choice.candidates if row["exit"] == 3)
    assert row == {"exit": 3, "agreement": 0.9, "cost": round(0.13 / 0.22, 4), "milliseconds": 130.0}
    assert "[3] " in caplog.text and "tokens/s" in caplog.text and "plain decoding looks faster" not in caplog.text


def test_two_exits_are_chosen_unless_one_is_better_by_far() -> None:
    known = {1: 0.4, 2: 0.5, 4: 0.95}
    pair = choose(list(known), N_LAYERS, None, agreeing(known, with_deeper=0.9), layers(0.1), True)
    assert pair.exits == [1, 4] and "choices of 2" in pair.reason, (
        "a cheap draft, judged by what is nearly always right"
    )
    alone = choose(list(known), N_LAYERS, None, agreeing(known, with_deeper=0.1), layers(0.1), True)
    assert alone.exits == [4], "no draft stands before the deeper one"
    listed = choose(list(known), N_LAYERS, 2, agreeing(known, with_deeper=0.1), layers(0.1), True)
    assert len(listed.exits) == 2, "two heads are listed"
    three = choose(list(known), N_LAYERS, 3, agreeing(known), layers(0.1), True)
    assert three.exits == [1, 2, 4]
    assert choose([1], N_LAYERS, None, agreeing(known), layers(0.1), True).exits == [1]


def test_a_choice_is_made_where_plain_decoding_is_faster(caplog: pytest.LogCaptureFixture) -> None:
    known = {2: 0.01, 4: 0.02}
    choice = choose(list(known), N_LAYERS, None, agreeing(known), layers(5.0), False)
    assert choice.exits and "plain decoding looks faster" in caplog.text
    assert "tokens/s" not in choice.reason and "milliseconds" not in choice.candidates[0], "costs have no unit"


# What candidates are tried on.


def test_candidates_are_spread_and_the_default_exits_among_them(tmp_path: Path) -> None:
    own = config(tmp_path, "none", exits="auto")
    assert own.candidates_for(30) == (2, 4, 5, 7, 8, 10, 12, 15, 17, 20)
    assert own.candidates_for(80)[0] == 2 and own.candidates_for(80)[-1] == 53
    assert own.candidates_for(6) == (1, 2, 3, 4) and own.candidates_for(2) == (1,)
    with pytest.raises(ConfigError, match="0 candidates for 1 exits"):
        own.candidates_for(1)


def test_documents_are_held_apart() -> None:
    batches = [MicroBatch(tuple(Document([n] * 10, [True] * 10) for n in range(5 * k, 5 * k + 5))) for k in range(8)]
    learned, apart = calibrate.split(batches, 160)
    assert (len(learned), len(apart)) == (16, 4)
    assert not {document.ids[0] for document in learned} & {document.ids[0] for document in apart}
    assert [len(part) for part in calibrate.split(batches, 10**6)] == [32, 8]
    assert [len(part) for part in calibrate.split(batches, 2)] == [1, 1]
    with pytest.raises(DataError, match="two documents"):
        calibrate.split([MicroBatch((Document([1, 2], [True, True]),))], 160)


@pytest.mark.parametrize(
    "head",
    [
        {"kind": "mlp"},
        {"kind": "block", "vocab_size": 160},
        {"kind": "lora"},
        {"kind": "norm", "unembedding": "copied"},
    ],
)
def test_quick_heads_of_every_kind_learn(tmp_path: Path, head: dict[str, Any]) -> None:
    own = config(
        tmp_path, model_folder(tmp_path, "llama_gqa"), exits="auto", head=head, train__lr=1e-2, calibration__steps=40
    )
    before = setup.prepare(own.model_copy(update={"exits": [4]}))
    trunk, documents = before.trunk, [document for batch in before.batches for document in batch.documents]
    batch = MicroBatch(tuple(documents))
    seen = [(batch, compute(trunk, [4], batch))]
    quick = before.model.heads_list[0]
    weights = digest(trunk.weights())

    def agreement() -> float:
        return float((calibrate._picks(quick, seen) == seen[0][1].truth.argmax_S).float().mean())

    lens = agreement()
    calibrate.teach(quick, seen, own)
    assert agreement() > lens + 0.05
    assert digest(trunk.weights()) == weights


def test_a_sharded_trunk_is_reckoned_by_its_weights(tmp_path: Path) -> None:
    trunk = setup.load_trunk(config(tmp_path, folder := model_folder(tmp_path, "llama_gqa")), str(folder))
    cost = calibrate.reckoned(trunk, HeadConfig(kind="norm", vocab_size=64))
    per_layer = sum(p.numel() for p in trunk.layers[0].parameters())
    assert cost(0, 6, 1, True) == 6 * per_layer + 211 * 48
    assert cost(2, 4, 8, True) == 2 * per_layer + 48 + 64 * 48 and cost(2, 4, 8, False) == 2 * per_layer + 48


# A whole run.


def test_a_run_chooses_exits_and_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = ["recipe=tiny", f"run_dir={tmp_path}", "data.stdlib_tokens=1500", "train.max_steps=2", "eval.max_prompts=1"]
    heads = "heads=[{kind: mlp},{kind: block}]"
    with caplog.at_level(logging.INFO, "hispec"):
        run([*words, "exits=auto", "calibration.steps=3", heads])
    kept = Choice.build(json.loads((tmp_path / "exits.json").read_text())["choice"])
    first, second = kept.exits
    assert 1 <= first < second <= 4 and [row["exit"] for row in kept.candidates] == [1, 2, 3, 4]
    assert all(0 <= row["agreement"] <= 1 and row["milliseconds"] > 0 for row in kept.candidates)
    model = HiSpecModel.from_pretrained(tmp_path / "heads")
    assert list(model.exits) == kept.exits and [head.config.kind for head in model.heads_list] == ["mlp", "block"]
    assert model.training["exits"] == {"chosen": "auto", "reason": kept.reason, "candidates": kept.candidates}
    assert f"- exits: {kept.reason}\n" in (tmp_path / "heads" / "README.md").read_text()
    assert kept.reason in caplog.text and "against plain" in caplog.text
    assert sorted(path.name for path in tmp_path.glob("exits*")) == ["exits.json"]


def test_calibration_leaves_nothing_behind(tmp_path: Path) -> None:
    """The run after it is the run with these exits given; and quick heads take no memory any more."""
    folder = model_folder(tmp_path, "llama_gqa")
    auto = config(tmp_path, folder, run_dir=str(tmp_path / "auto"), head__kind="block", **QUICK)
    measured = train(auto)
    exits = [row["exit"] for row in measured["exits"]]
    given = config(tmp_path, folder, run_dir=str(tmp_path / "given"), head__kind="block", exits=exits)
    assert train(given) == measured and losses(auto.run_dir) == losses(given.run_dir)

    def n_heads() -> int:
        gc.collect()
        return sum(type(thing) is Head for thing in gc.get_objects())  # some things warn when they are asked for more

    before = n_heads()
    prepared = setup.prepare(auto.model_copy(update={"run_dir": str(tmp_path / "again")}))
    assert n_heads() - before == 2 * len(prepared.model.exits)


# Once for a run.


def by_hand(settings: TrainConfig, **changes: Any) -> Path:
    """A choice that no calibration would make, in the run folder."""
    path = Path(settings.run_dir) / "exits.json"
    kept = json.loads(path.read_text())
    kept["choice"] |= {"exits": [1, 3, 4], "reason": "by hand"} | changes
    path.write_text(json.dumps(kept))
    return path


def test_a_run_that_is_started_again_keeps_its_choice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = config(tmp_path, model_folder(tmp_path, "llama_gqa"), head__kind="norm", **QUICK)
    setup.prepare(settings)
    path = by_hand(settings)
    with caplog.at_level(logging.INFO, "hispec"):
        prepared = setup.prepare(settings)
    assert prepared.model.exits == (1, 3, 4) and "exits=auto: [1, 3, 4]: by hand" in caplog.text
    # Stopped before its first checkpoint, or after it: then the checkpoint knows.
    train(settings)
    path.unlink()
    assert [row["exit"] for row in train(settings)["exits"]] == [1, 3, 4] and not path.exists()
    assert HiSpecModel.from_pretrained(Path(settings.run_dir) / "heads").training["exits"]["reason"] == "by hand"
    other = settings.model_copy(update={"calibration": settings.calibration.model_copy(update={"steps": 3})})
    with pytest.raises(ConfigError, match=r"calibration\.steps=2, now it is 3; give the same"):
        train(other)


def test_other_settings_and_resume_never_choose_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = config(tmp_path, model_folder(tmp_path, "llama_gqa"), head__kind="norm", **QUICK)
    setup.prepare(settings)
    others = [
        config(tmp_path, settings.model, head__kind="mlp", **QUICK),
        settings.model_copy(update={"resume": "never"}),
    ]
    for other in others:
        by_hand(settings)
        with caplog.at_level(logging.INFO, "hispec"):
            choice = setup.prepare(other).choice
        assert choice is not None and choice.reason != "by hand"
        setup.prepare(settings)
    assert "exits.json was chosen with other settings; calibrating again" in caplog.text
    path = by_hand(settings)
    for damage in ("", "[]", '{"choice": {}}', path.read_text().replace('"reason"', '"raison"')):
        path.write_text(damage)
        caplog.clear()
        assert setup.prepare(settings).choice is not None and "exits.json is damaged" in caplog.text


def chosen(settings: list[TrainConfig]) -> list[tuple[list[int], dict[str, Any]]]:
    """Exits, and what is exported of them, of some runs."""
    return [([row["exit"] for row in train(own)["exits"]], json_of(own)) for own in settings]


def json_of(settings: TrainConfig) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(settings.run_dir) / "exits.json").read_text())["choice"]
    return found


def test_ranks_agree(tmp_path: Path) -> None:
    """The first one calibrates; where the trunk is sharded, all of them."""
    folder = model_folder(tmp_path, "llama_gqa")
    settings = [
        config(tmp_path, folder, run_dir=str(tmp_path / shard), trunk__shard=shard, eval__max_prompts=1, **QUICK)
        for shard in ("none", "zero3")
    ]
    first, second = in_ranks(2, chosen, settings)
    assert first == second
    (_, measured), (exits, reckoned) = first
    assert exits == reckoned["exits"]
    assert "milliseconds" in measured["candidates"][0] and "milliseconds" not in reckoned["candidates"][0]
    assert all(0 < row["cost"] < 1 for row in reckoned["candidates"])


def test_a_bf16_trunk_is_calibrated(tmp_path: Path) -> None:
    settings = config(tmp_path, model_folder(tmp_path, "llama_gqa"), dtype="bfloat16", head__kind="block", **QUICK)
    prepared = setup.prepare(settings)
    assert prepared.choice is not None and prepared.trunk.dtype == torch.bfloat16


# What a user types.


def test_a_plan_says_that_exits_will_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["recipe=tiny", "plan=true", "exits=auto", f"run_dir={tmp_path}"])
    out = capsys.readouterr().out
    assert "chosen when the run starts, by a short calibration, which a plan does not run, among 1, 2, 3, 4" in out
    assert out.count("exit auto ") == 2 and not (tmp_path / "exits.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["exits=best"], "exits: must be a list of layers such as [4,8], auto, or null (got 'best')"),
        (["exits=[auto]"], "must be a list of layers"),
        (["exits=3"], "must be a list of layers"),
        (["calibration.steps=3"], "calibration belongs to exits=auto"),
        (["exits=auto", "calibration.step=3"], "did you mean 'calibration.steps'?"),
        (["exits=auto", "calibration.candidates=[2,6]"], "calibration.candidates: 6 is out of range; legal exits"),
        (["exits=auto", "calibration.candidates=[]"], "calibration.candidates: "),
        (["exits=auto", "calibration.candidates=[2]", "heads=[{},{}]"], "1 candidates for 2 exits"),
        (["exits=auto", "heads=[]"], "list one head for each exit, or none"),
    ],
)
@pytest.mark.parametrize("plan", ["false", "true"])
def test_mistakes_are_told_in_one_line(tmp_path: Path, words: list[str], message: str, plan: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(["recipe=tiny", f"run_dir={tmp_path}", f"plan={plan}", *words])
    assert message in str(caught.value) and "\n" not in str(caught.value)
