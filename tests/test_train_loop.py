"""Whole runs of a few steps on tiny models: what is trained, what is not, what is resumed, what is exported."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCAB
from train_fixtures import GENERATION, PLAIN, config, digest, losses, model_folder, prompts_file
from transformers import AutoTokenizer

from hispec.attention import PackedAttention
from hispec.decode.decoder import Decoder
from hispec.decode.request import SamplingParams
from hispec.errors import BaseMismatchError, CheckpointError, ConfigError
from hispec.model import HiSpecModel
from hispec.train.loop import Interrupted, Training, n_steps, train
from hispec.train.metrics import read
from hispec.train.optim_config import OptimConfig
from hispec.train.schedule import learning_rate
from hispec.train.stop import Stop


class StopAfter(Stop):
    """Stops as SIGTERM does, at a known step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def after(self, step: int) -> int:
        return 143 if step >= self.step else 0


@pytest.mark.parametrize("name", ["llama_tied", "qwen3"])
def test_m02_training_leaves_the_trunk_as_it_is(tmp_path: Path, name: str) -> None:
    settings = config(
        tmp_path, model_folder(tmp_path, name), train__max_steps=5, train__lr=0.1, train__weight_decay=0.1
    )
    run = Training(settings)
    before = digest(run.model.trunk.model.named_parameters())
    heads = digest(run.engine.state().items())
    greedy = Decoder(run.model, exits=()).generate([[5, 17, 101]], SamplingParams(max_new_tokens=8))[0].ids
    run.run(Stop())
    assert digest(run.model.trunk.model.named_parameters()) == before
    assert digest(run.engine.state().items()) != heads
    assert Decoder(run.model, exits=()).generate([[5, 17, 101]], SamplingParams(max_new_tokens=8))[0].ids == greedy


def test_t01_dropout_stays_off(tmp_path: Path) -> None:
    run = Training(config(tmp_path, model_folder(tmp_path, "opt_pre"), data__cache=False))
    run.train_step()
    batch = run.batches[0]
    first, second = run.cache.get(batch), run.cache.get(batch)
    assert all(torch.equal(first.hidden[exit_], second.hidden[exit_]) for exit_ in (2, 4))
    assert torch.equal(first.truth.final_SD, second.truth.final_SD)
    inputs = (first.hidden, batch.ids_T, batch.positions_T, batch.rows_S, batch.lengths)
    assert all(
        torch.equal(a.features_SD, b.features_SD)
        for a, b in zip(run.engine.readings(*inputs), run.engine.readings(*inputs), strict=True)
    )


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["llama_gqa", "llama_tied"])
def test_t02_t03_t04_every_zero_stage_trains_the_heads_only(tmp_path: Path, name: str, zero: int) -> None:
    folder = model_folder(tmp_path, name)
    settings = config(tmp_path, folder, train__zero=zero, train__weight_decay=0.1, train__accumulation=2)
    run = Training(settings)
    before = digest(run.model.trunk.model.named_parameters())
    expected = sum(p.numel() for p in run.model.heads.parameters() if p.requires_grad)
    for _ in range(3):
        run.train_step()
    assert run.engine.n_parameters == expected
    held = sum(p.numel() for p in run.engine.optimized)
    # ZeRO keeps flat copies, padded a little; stage 3 holds its own elsewhere.
    assert held == expected if zero == 0 else held <= expected + 16
    assert digest(run.model.trunk.model.named_parameters()) == before
    twin = Training(
        config(tmp_path, folder, run_dir=str(tmp_path / "twin"), train__weight_decay=0.1, train__accumulation=2)
    )
    for _ in range(3):
        twin.train_step()
    assert losses(settings.run_dir) == pytest.approx(losses(twin.config.run_dir), rel=1e-3)


def test_t09_accumulation_counts_tokens_not_batches(tmp_path: Path) -> None:
    """All data in one micro batch, or spread over four of unequal sizes: the same heads."""
    folder = model_folder(tmp_path, "llama_gqa")
    states = []
    for number, (tokens, accumulation) in enumerate([(2048, 1), (64, None)]):
        run_dir = str(tmp_path / str(number))
        settings = config(tmp_path, folder, run_dir=run_dir, train__micro_batch_tokens=tokens, train__max_steps=1)
        n_batches = len(Training(settings).batches)
        settings = config(
            tmp_path, folder, run_dir=run_dir, train__micro_batch_tokens=tokens, train__max_steps=1,
            train__accumulation=accumulation or n_batches, train__warmup=0.0, train__clip=0.0, train__lr=1e-3,
        )  # fmt: skip
        run = Training(settings)
        assert (len(run.batches) == 1) == (accumulation == 1)
        sizes = {len(batch.rows_S) for batch in run.batches}
        assert len(sizes) > 1 or accumulation == 1
        run.train_step()
        states.append((losses(settings.run_dir)[-1], run.engine.state()))
    assert states[0][0] == pytest.approx(states[1][0], rel=1e-5)
    # AdamW's first step is the sign of the gradient times lr, so equality is asked where the gradient is not noise.
    same = [torch.isclose(states[0][1][name], states[1][1][name], atol=1e-5).float().mean() for name in states[0][1]]
    assert min(float(share) for share in same) > 0.99


@pytest.mark.parametrize("zero", [0, 2])
def test_t12_ten_steps_and_ten_resumed_are_twenty(tmp_path: Path, zero: int) -> None:
    folder = model_folder(tmp_path, "llama_gqa")
    changes: dict[str, Any] = {"train__max_steps": 20, "train__zero": zero, "train__accumulation": 2}
    whole = config(tmp_path, folder, run_dir=str(tmp_path / "whole"), **changes)
    straight = Training(whole)
    straight.run(Stop())
    broken = config(tmp_path, folder, run_dir=str(tmp_path / "broken"), **changes)
    with pytest.raises(Interrupted) as caught:
        Training(broken).run(StopAfter(10))
    assert caught.value.code == 143
    resumed = Training(broken)
    assert resumed.step == 10
    resumed.run(Stop())
    first, second = (read(Path(settings.run_dir) / "metrics.jsonl") for settings in (whole, broken))
    assert [line["step"] for line in second] == [line["step"] for line in first]
    assert first == second
    assert digest(resumed.engine.state().items()) == digest(straight.engine.state().items())


def test_an_interrupted_checkpoint_is_not_resumed_from(tmp_path: Path) -> None:
    settings = config(tmp_path, model_folder(tmp_path, "llama_gqa"), train__save_every=1)
    train(settings)
    newest = sorted((Path(settings.run_dir) / "checkpoints").iterdir())[-1]
    (newest / "state.json").unlink()  # it is written last: without it the checkpoint is half one
    assert Training(settings).step == 2


def test_other_settings_are_not_resumed_in_silence(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "llama_gqa")
    train(config(tmp_path, folder))
    with pytest.raises(ConfigError, match=r"train\.lr=0\.001, now it is 0\.01.*resume=never"):
        Training(config(tmp_path, folder, train__lr=0.01))
    assert Training(config(tmp_path, folder, train__lr=0.01, resume="never")).step == 0


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    settings = config(tmp_path, model_folder(tmp_path, "llama_gqa"))
    train(settings)
    for path in (Path(settings.run_dir) / "checkpoints").glob("*/*.safetensors"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="step_000003.*resume=never"):
        Training(settings)


def test_c04_checkpoints_hold_heads_and_optimizer_only(tmp_path: Path) -> None:
    settings = config(tmp_path, model_folder(tmp_path, "llama_gqa"), head={"kind": "norm"})
    run = Training(settings)
    run.run(Stop())
    size = sum(path.stat().st_size for path in (Path(settings.run_dir) / "checkpoints").rglob("*.safetensors"))
    trunk = sum(p.numel() * p.element_size() for p in run.model.trunk.model.parameters())
    assert size < trunk / 4


def test_m19_a_base_without_a_pad_token_is_trained_on_and_left_alone(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "llama_gqa")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    run = Training(config(tmp_path, folder))
    run.run(Stop())
    assert run.model.tokenizer.pad_token is None and len(run.model.tokenizer) == len(tokenizer)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert run.model.trunk.model.get_input_embeddings().num_embeddings == VOCAB


def test_a_norm_head_of_a_model_without_a_final_norm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'norm' has nothing to train, this model has no final norm"):
        Training(config(tmp_path, model_folder(tmp_path, "opt_post_proj"), head={"kind": "norm"}))


def test_features_from_the_cache_change_nothing(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "llama_gqa")
    cached = config(tmp_path, folder, run_dir=str(tmp_path / "cached"), train__max_steps=12)
    direct = config(tmp_path, folder, run_dir=str(tmp_path / "direct"), train__max_steps=12, data__cache=False)
    with_cache = Training(cached)
    for run in (with_cache, Training(direct)):
        run.run(Stop())
    assert losses(cached.run_dir) == losses(direct.run_dir)
    assert with_cache.cache.misses == len(with_cache.batches) < 12
    # A damaged file is made again; other data does not meet old features.
    broken = next((tmp_path / "cached" / "features").iterdir())
    broken.write_bytes(broken.read_bytes()[:50])
    with_cache.cache.misses = 0
    for batch in with_cache.batches:
        with_cache.cache.get(batch)
    assert with_cache.cache.misses == 1


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("own", [{"kind": "lora", "rank": 4}, {"kind": "norm", "unembedding": "copied"}])
def test_t04_an_unembedding_of_ones_own_trains_the_same_under_every_zero_stage(
    tmp_path: Path, own: dict[str, Any], zero: int
) -> None:
    folder = model_folder(tmp_path, "llama_tied")
    states = []
    for stage in (zero, 0):
        run_dir = str(tmp_path / f"zero{stage}")
        run = Training(config(tmp_path, folder, run_dir=run_dir, train__zero=stage, train__lr=1e-2, head=own))
        for _ in range(3):
            run.train_step()
        states.append((losses(run.config.run_dir), run.engine.state()))
    assert states[0][0] == pytest.approx(states[1][0], rel=1e-3)
    assert all(torch.allclose(states[0][1][name], states[1][1][name], atol=1e-3) for name in states[1][1])


KINDS: list[dict[str, Any]] = [
    {"kind": "norm"}, {"kind": "mlp"}, {"kind": "block", "vocab_size": 60}, {"kind": "lora"},
    {"kind": "lora", "vocab_size": 60, "rank": 40}, {"kind": "norm", "unembedding": "copied"},
]  # fmt: skip


@pytest.mark.parametrize("head", KINDS, ids=lambda head: " ".join(map(str, head.values())))
def test_heads_learn(tmp_path: Path, head: dict[str, Any]) -> None:
    """On a text they see again and again, every kind gets closer to the full model."""
    kind = "norm" if head == {"kind": "norm"} else "more"
    settings = config(tmp_path, model_folder(tmp_path, "llama_gqa"), train__max_steps=60, train__lr=1e-2, head=head)
    train(settings)
    curve = losses(settings.run_dir)
    assert curve[-1] < (0.85 if kind == "norm" else 0.7) * curve[0]  # a norm alone cannot do much


def test_exported_heads_are_the_trained_ones(tmp_path: Path) -> None:
    """C01 tied trunk, C08 chat template, C11 wrong base."""
    folder = model_folder(tmp_path, "llama_tied")
    template = tmp_path / "own.jinja"
    template.write_text(GENERATION)
    settings = config(tmp_path, folder, chat_template=str(template), train__max_steps=5)
    run = Training(settings)
    measured = run.run(Stop())
    exported = HiSpecModel.from_pretrained(Path(settings.run_dir) / "heads")
    ids_T = torch.tensor([5, 17, 101, 33])
    for ours, theirs in zip(run.model.heads_list, exported.heads_list, strict=True):
        hidden_TD = torch.randn(4, 48)
        inputs = (hidden_TD, ids_T, torch.arange(4), PackedAttention([4]))
        assert torch.equal(ours.logits(ours.features(*inputs)), theirs.logits(theirs.features(*inputs)))
    assert exported.tokenizer.chat_template == GENERATION != PLAIN
    assert exported.metrics == measured and exported.training["steps"] == 5
    card = (Path(settings.run_dir) / "heads" / "README.md").read_text()
    assert "same top-1 token" in card and "tokens per full pass, decoded" in card
    with pytest.raises(BaseMismatchError):
        HiSpecModel.from_pretrained(Path(settings.run_dir) / "heads", base=str(model_folder(tmp_path, "llama_gqa")))


def test_bf16_trunk_trains_float32_heads(tmp_path: Path) -> None:
    settings = config(
        tmp_path, model_folder(tmp_path, "llama_gqa"), dtype="bfloat16", train__max_steps=20, train__lr=1e-2
    )
    run = Training(settings)
    run.run(Stop())
    assert {tensor.dtype for tensor in run.engine.state().values()} == {torch.float32}
    exported = HiSpecModel.from_pretrained(Path(settings.run_dir) / "heads", dtype=torch.bfloat16)
    assert {p.dtype for p in exported.heads.parameters()} == {torch.bfloat16}
    assert losses(settings.run_dir)[-1] < losses(settings.run_dir)[0]


def test_a_signal_finishes_the_step_and_saves(tmp_path: Path) -> None:
    settings = config(tmp_path, model_folder(tmp_path, "llama_gqa"))
    run = Training(settings)
    stop = Stop()
    with stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.after(0) == 130
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)  # the second one is meant
            signal.pthread_sigmask(signal.SIG_BLOCK, [])  # the handler has run when this returns
    with pytest.raises(Interrupted):
        run.run(StopAfter(1))
    assert json.loads(next((Path(settings.run_dir) / "checkpoints").glob("*/state.json")).read_text())["step"] == 1


def test_run_folder_holds_what_is_needed_to_repeat_it(tmp_path: Path) -> None:
    settings = config(tmp_path, model_folder(tmp_path, "llama_gqa"), eval__every=2)
    train(settings)
    folder = Path(settings.run_dir)
    environment = json.loads((folder / "environment.json").read_text())
    assert {"command", "torch", "deepspeed", "threads"} <= environment.keys()
    assert "run_dir:" in (folder / "config.yaml").read_text()
    lines = read(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 2, 3, 3]
    assert {"loss", "kl", "ce", "acceptance", "top1", "exit"} == lines[0]["heads"][0].keys()
    assert lines[-1]["eval"]["exits"][0].keys() == {"exit", "top1", "acceptance", "tokens_per_full_pass"}


def test_t18_wandb_offline_needs_no_network(tmp_path: Path) -> None:
    settings = config(tmp_path, model_folder(tmp_path, "llama_gqa"), wandb__mode="offline", head={"kind": "norm"})
    train(settings)
    assert list((Path(settings.run_dir) / "wandb").glob("offline-run-*"))


def test_schedule_and_length() -> None:
    settings = OptimConfig().model_copy(update={"lr": 1.0, "warmup": 0.25, "final_lr": 0.1})
    rates = [learning_rate(settings, step, 20) for step in range(20)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5] == pytest.approx(1.0) and rates[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in zip(rates[5:], rates[6:], strict=False))
    epochs = settings.model_copy(update={"max_steps": None, "epochs": 2.0, "accumulation": 3})
    assert n_steps(epochs, 10, 3) == 7 and n_steps(epochs, 10, 6) == 4


def test_evaluation_prompts_may_come_from_a_file(tmp_path: Path) -> None:
    settings = config(tmp_path, model_folder(tmp_path, "llama_gqa"), eval__prompts=str(prompts_file(tmp_path)))
    assert len(Training(settings).held_out) == 3


def test_schedules_fall_as_they_are_named() -> None:
    base = OptimConfig().model_copy(update={"lr": 1.0, "warmup": 0.0, "final_lr": 0.1, "cooldown": 0.25})
    curves = {
        name: [learning_rate(base.model_copy(update={"schedule": name}), step, 21) for step in range(21)]
        for name in ("cosine", "linear", "constant", "wsd")
    }
    assert curves["constant"] == [1.0] * 21
    assert curves["linear"][10] == pytest.approx(0.55) == pytest.approx(curves["cosine"][10])
    assert curves["linear"][5] < curves["cosine"][5]
    assert curves["wsd"][15] == 1.0 and curves["wsd"][18] == pytest.approx(0.1 + 0.9 * 0.4)
    assert all(curve[-1] == pytest.approx(0.1) for name, curve in curves.items() if name != "constant")


def test_muon_takes_the_matrices_and_adamw_the_rest(tmp_path: Path) -> None:
    """Against a twin: torch's two optimizers, side by side on the same gradients."""
    folder = model_folder(tmp_path, "llama_gqa")
    settings = config(tmp_path, folder, train__optimizer="muon", train__clip=0.0, train__warmup=0.0, train__lr=1e-2)
    run = Training(settings)
    before = run.engine.state()
    seen: dict[str, torch.Tensor] = {}
    step = run.engine.step

    def noting(lr: float) -> None:
        seen.update({name: p.grad.clone() for name, p in run.engine._trained.items() if p.grad is not None})
        step(lr)

    run.engine.step = noting  # type: ignore[method-assign]
    run.train_step()
    after = run.engine.state()
    lr = learning_rate(settings.train, 0, run.steps)
    for name, grad in seen.items():
        twin = torch.nn.Parameter(before[name].clone())
        twin.grad = grad
        if twin.dim() == 2:
            dull: Any = torch.optim.Muon([twin], lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        else:
            dull = torch.optim.AdamW([twin], lr=lr, betas=settings.train.betas, weight_decay=0.0)
        dull.step()
        assert torch.allclose(after[name], twin, atol=1e-6), name
        # Behind the zero of a head that starts as the logit lens nothing has a gradient yet.
        assert torch.equal(after[name], before[name]) != bool(grad.any()), name


def test_muon_needs_whole_matrices() -> None:
    with pytest.raises(ConfigError, match="optimizer=muon needs whole matrices, which zero=2 splits"):
        OptimConfig.build({"optimizer": "muon", "zero": 2})


@pytest.mark.parametrize(
    "changes", [{"optimizer": "muon"}, {"ema": 0.9}, {"ema": 0.9, "zero": 3}, {"ema": 0.9, "zero": 1}]
)
def test_t12_muon_and_running_means_survive_a_resume(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = model_folder(tmp_path, "llama_gqa")
    more = {f"train__{name}": value for name, value in changes.items()}
    more |= {"train__max_steps": 12, "train__accumulation": 2}
    whole = config(tmp_path, folder, run_dir=str(tmp_path / "whole"), **more)
    straight = Training(whole)
    straight.run(Stop())
    broken = config(tmp_path, folder, run_dir=str(tmp_path / "broken"), **more)
    with pytest.raises(Interrupted):
        Training(broken).run(StopAfter(6))
    resumed = Training(broken)
    resumed.run(Stop())
    assert losses(whole.run_dir) == losses(broken.run_dir)
    assert digest(resumed.engine.state().items()) == digest(straight.engine.state().items())


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_the_running_mean_is_exported_and_not_trained_on(tmp_path: Path, zero: int) -> None:
    folder = model_folder(tmp_path, "llama_gqa")
    changes: dict[str, Any] = {"train__max_steps": 6, "train__lr": 1e-2, "train__zero": zero}
    plain = Training(config(tmp_path, folder, run_dir=str(tmp_path / "plain"), **changes))
    run = Training(config(tmp_path, folder, run_dir=str(tmp_path / "ema"), train__ema=0.5, **changes))
    mean = {name: value.double() for name, value in run.engine.state().items()}
    for number in range(6):
        plain.train_step()
        run.train_step()
        decay = min(0.5, (2 + number) / (11 + number))
        now = plain.engine.state()
        mean = {name: decay * value + (1 - decay) * now[name] for name, value in mean.items()}
    assert losses(plain.config.run_dir) == losses(run.config.run_dir)
    for name, value in run.engine.state().items():
        assert torch.allclose(value, mean[name].float(), atol=1e-6), name
    raw = plain.engine.state()
    assert any(not torch.allclose(value, raw[name], atol=1e-4) for name, value in run.engine.state().items())


def test_c10_stop_tokens_go_from_the_base_through_training(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "llama_gqa")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    settings = config(tmp_path, folder, train__max_steps=1, head={"kind": "norm"})
    train(settings)
    assert HiSpecModel.from_pretrained(settings.heads_folder).generation.eos_token_id == [2, 9]
