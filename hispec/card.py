"""The model card that a heads folder carries to the Hub, and the tables of what was measured."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hispec.checkpoint import FILES, CheckpointConfig

# Places in a draft that were judged less often than this share of the first one say little.
SELDOM = 0.02
# From one heading to the next: the part of a card that depends on where the heads lie.
USE = re.compile(r"^## Use\n.*?(?=^## )", re.MULTILINE | re.DOTALL)


class Table(NamedTuple):
    """What was measured, ready to be shown."""

    title: str
    header: list[str]
    rows: list[list[str]]


def write_card(config: CheckpointConfig, name: str, files: Sequence[str]) -> str:
    """Markdown with the Hub's metadata block: what the heads are, what was measured, the lines that use them.

    `name`: what a reader gives to `from_pretrained`. `files`: what lies in the folder.
    """
    depth = config.base.fingerprint.n_layers
    heads = Table(
        "",
        ["exit", "kind", "vocabulary"],
        [[f"{h.exit} of {depth}", h.head.kind, str(h.head.vocab_size or "full")] for h in config.heads],
    )
    lines = [
        f"---\n{_metadata(config).to_yaml()}\n---",
        f"# Early-exit heads for {config.base.id}",
        "The full model decides every token: the output is its own, these heads only make it come faster.",
        _markdown(heads),
        _use(name, None),
        "## Measured",
        "\n\n".join(map(_markdown, measured(config.metrics))) or "Not measured.",
        "## Trained",
        "\n".join(_fact(*fact) for fact in config.training.items()) or "Not trained: logit lens.",
        "## Files",
        _markdown(Table("", ["file", "holds"], [[f"`{file}`", FILES[file]] for file in FILES if file in files])),
    ]
    return str(ModelCard("\n\n".join(lines) + "\n"))


def readdress(card: str, name: str, revision: str | None) -> str:
    """The card of heads that can now be loaded as `name`; what somebody wrote into its other parts stays."""
    return USE.sub(lambda _: _use(name, revision) + "\n\n", card)


def measured(metrics: dict[str, Any]) -> list[Table]:
    """What an evaluation measured; no table where nothing was."""
    if not metrics.get("exits"):
        return []
    alone = [
        [str(row["exit"]), _shown(row, "top1", ".1%"), _shown(row, "acceptance"), _shown(row, "tokens_per_full_pass")]
        for row in metrics["exits"]
    ]
    n_prompts, n_tokens, policy = (_shown(metrics, name, "") for name in ("prompts", "tokens", "policy"))
    decoded = [
        _shown(metrics, "simulated_tokens_per_full_pass"),
        _shown(metrics, "measured_tokens_per_full_pass"),
        _shown(metrics, "identical_outputs", ".0%"),
    ]
    tables = [
        Table(
            "Each exit against the full model, on its own answers to held-out prompts",
            ["exit", "same top-1 token", "sum min(p, q)", "tokens per full pass, this exit alone"],
            alone,
        ),
        Table(
            f"The same prompts decoded ({n_prompts} prompts, {n_tokens} tokens, greedy, policy {policy})",
            ["tokens per full pass, simulated", "tokens per full pass, decoded", "output as without heads"],
            [decoded],
        ),
    ]
    return tables + ([_positions(metrics["judges"])] if metrics.get("judges") else [])


def often_judged(judge: dict[str, Any]) -> list[float]:
    """Share of tokens that a judge let stand, by place in what lay before it, as far as it was often asked."""
    judged = judge["judged_at"]
    return [a / n for a, n in zip(judge["accepted_at"], judged, strict=True) if n >= SELDOM * judged[0]]


def _fact(name: str, value: Any) -> str:
    if isinstance(value, dict) and "reason" in value:  # the tables behind it are in the checkpoint's config
        value = value["reason"]
    return f"- {name}: {value}"


def _shown(values: dict[str, Any], name: str, form: str = ".3f") -> str:
    return format(values[name], form) if name in values else "not measured"


def _positions(judges: list[dict[str, Any]]) -> Table:
    shares = [often_judged(judge) for judge in judges]
    longest = max(map(len, shares))
    rows = [
        [judge["judge"], f"{judge['accepted']:.1%}", *(f"{share:.0%}" for share in own), *[""] * (longest - len(own))]
        for judge, own in zip(judges, shares, strict=True)
    ]
    places = [str(place + 1) for place in range(longest)]
    return Table("Drafted tokens that stood, all and by position in the draft", ["judged by", "all", *places], rows)


def _metadata(config: CheckpointConfig) -> ModelCardData:
    local = config.base.id.startswith(("/", ".", "package:"))
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type="held-out-prompts",
            dataset_name="held-out prompts, answered by the full model",
            metric_type=name,
            metric_name=f"exit {row['exit']}: {title}",
            metric_value=round(row[name], 4),
        )
        for row in config.metrics.get("exits", [])
        for name, title in (("top1", "same top-1 token"), ("acceptance", "sum min(p, q)"))
        if name in row
    ]
    return ModelCardData(
        library_name="hispec",
        base_model=None if local else config.base.id,
        tags=["hispec", "speculative-decoding", "early-exit", config.base.fingerprint.model_type],
        pipeline_tag="text-generation",
        model_name=f"early-exit heads for {config.base.id}",
        eval_results=results or None,
    )


def _use(name: str, revision: str | None) -> str:
    argument, option = (f', revision="{revision}"', f" revision={revision}") if revision else ("", "")
    return (
        "## Use\n\n"
        "```python\nfrom hispec import Decoder, HiSpecModel\n\n"
        f'decoder = Decoder(HiSpecModel.from_pretrained("{name}"{argument}))\n'
        'print(decoder.generate("Once upon a time")[0].text)\n```\n\n'
        f'```sh\nhispec-decode model={name}{option} prompt="Once upon a time"\n```'
    )


def _markdown(table: Table) -> str:
    lines = [table.header, ["---"] * len(table.header), *table.rows]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table.title}:\n\n{text}" if table.title else text
