"""benchmarks/auto.py: that it measures every setting, and says plainly which fail. No figure of speed is tested."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_fixtures import with_heads, write_base
from typed import Typed

from hispec import HiSpecModel

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "auto.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def row(name: str, seconds: float, *ratios: float) -> dict[str, Any]:
    return {
        "contestant": name, "prompt_set": "one", "batch": 8, "tokens": 300, "seconds": seconds, "identical": True,
        "ratio_per_turn": list(ratios), "ratio_to_plain": sorted(ratios)[len(ratios) // 2],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("plain", "fixed", "auto", "best", "lines"),
    [
        (10.0, 12.0, 10.2, "plain", []),  # 0.98 of plain, which is the best
        (10.0, 12.0, 10.4, "plain", ["auto/plain is 0.962, below 0.97"]),
        (10.0, 8.0, 9.0, "fixed:1", ["auto/best (fixed:1) is 0.889, below 0.95"]),
        (10.0, 8.0, 12.0, "fixed:1", ["auto/plain is 0.833, below 0.97", "auto/best (fixed:1) is 0.667, below 0.95"]),
    ],
)
def test_a_setting_passes_by_the_whole_time(
    script: dict[str, Any], plain: float, fixed: float, auto: float, best: str, lines: list[str]
) -> None:
    # Turn by turn auto always looks good: one slow turn of three is what the median does not see.
    rows = [row("plain", plain, 1.0, 1.0, 1.0), row("fixed:1", fixed, 0.5, 1.0, 2.0), row("auto", auto, 0.1, 3.0, 3.0)]
    found = {"heads": "trained", **script["judge"](rows)}
    assert found["best"] == best and found["passed"] == (not lines) and found["auto_to_plain_by_turn"] == 3.0
    assert found["auto_to_best_by_turn"] == (3.0 if best == "plain" else 1.5)
    head, *said = script["summary"]([found]).splitlines()
    assert head == f"1 settings, {0 if lines else 1} passed, {1 if lines else 0} failed"
    assert said == [f"FAILED: trained heads, one, batch 8: {text}" for text in lines]
    assert script["line"](found).endswith("FAILED" if lines else "passed")


def test_random_heads_are_of_the_same_kind_and_say_nothing_about_themselves(
    script: dict[str, Any], tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base")
    model = HiSpecModel.from_base(base)
    model.heads = with_heads(model.trunk, (2, 4), "block").heads
    model.metrics = {"exits": [{"exit": 2, "top1": 0.9}]}
    model.save_pretrained(tmp_path / "trained")
    script["write_random"](HiSpecModel.from_pretrained(tmp_path / "trained"), tmp_path / "random")
    one, two = (HiSpecModel.from_pretrained(tmp_path / name) for name in ("trained", "random"))
    assert one.exits == two.exits and [h.config for h in one.heads_list] == [h.config for h in two.heads_list]
    assert one.metrics and not two.metrics
    for old, new in zip(one.heads.parameters(), two.heads.parameters(), strict=True):
        assert old.shape == new.shape and not torch.equal(old, new)
        assert float(new.detach().std()) == pytest.approx(0.02, rel=0.5)


def test_policies_are_those_that_the_exits_allow(script: dict[str, Any]) -> None:
    one, two = script["contestants"]((4,)), script["contestants"]((4, 8, 12))
    assert list(one) == ["plain", "plain_lookup", "auto", "fixed:1", "fixed:2", "fixed:4"]
    assert list(two) == [*one, "fixed:1,1", "fixed:2,2", "fixed:2,4"]
    assert two["fixed:2"] == {"exits": [4], "policy": "fixed:2"}
    assert two["fixed:2,4"] == {"exits": [4, 8], "policy": "fixed:2,4"}


def test_every_setting_is_measured_and_kept(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path / "cache"))
    model = HiSpecModel.from_base(write_base(tmp_path / "base"))
    model.heads = with_heads(model.trunk, (2, 4)).heads
    model.save_pretrained(tmp_path / "heads")
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("ab", "cd")))
    words = [str(tmp_path / "heads"), f"one={tmp_path / 'one.jsonl'}", f"two={tmp_path / 'two.jsonl'}"]
    words += ["--prompts", "2", "--max-new-tokens", "3", "--output", str(tmp_path / "auto.json")]
    typed = Typed("auto.py", script["main"], monkeypatch, capsys)
    lines = typed(*words).splitlines()
    assert len(lines) >= 9 and lines[8].startswith("8 settings, ")
    result = json.loads((tmp_path / "auto.json").read_text())
    settings = [(s["heads"], s["prompt_set"], s["batch"]) for s in result["settings"]]
    assert settings == [(h, name, b) for h in ("trained", "random") for name in ("one", "two") for b in (1, 8)]
    assert all(s["identical"] and len(s["tokens_per_s"]) == 9 for s in result["settings"])
    assert len(result["rows"]) == 8 * 9 and result["limits"] == {"auto_to_plain": 0.97, "auto_to_best": 0.95}
    with pytest.raises(SystemExit) as caught:
        typed(words[0], "no_such_set")
    assert caught.value.code == 2 and "unknown prompt set 'no_such_set'" in capsys.readouterr().err
