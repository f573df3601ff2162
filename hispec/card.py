"""The model card that a heads folder carries to the Hub."""

from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from hispec.checkpoint import CheckpointConfig


def write_card(config: CheckpointConfig, name: str) -> str:
    """Markdown with the Hub's metadata block: what the heads are, what was measured, the lines that use them.

    `name`: what a reader gives to `from_pretrained`.
    """
    local = config.base.id.startswith(("/", ".", "package:"))
    data = ModelCardData(
        library_name="hispec",
        base_model=None if local else config.base.id,
        tags=["hispec", "speculative-decoding", "early-exit", config.base.fingerprint.model_type],
        pipeline_tag="text-generation",
    )
    depth = config.base.fingerprint.n_layers
    lines = [
        f"---\n{data.to_yaml()}\n---",
        f"# Early-exit heads for {config.base.id}",
        "The full model decides every token: the output is its own, these heads only make it come faster.",
        _table(
            ["exit", "kind", "vocabulary"],
            [[f"{h.exit} of {depth}", h.head.kind, str(h.head.vocab_size or "full")] for h in config.heads],
        ),
        "## Use",
        "```python\nfrom hispec import Decoder, HiSpecModel\n"
        f'decoder = Decoder(HiSpecModel.from_pretrained("{name}"))\n'
        'print(decoder.generate("Once upon a time")[0].text)\n```',
        "## Measured",
        _metrics(config.metrics),
        "## Trained",
        "\n".join(f"- {key}: {value}" for key, value in config.training.items()) or "Not trained: logit lens.",
    ]
    return str(ModelCard("\n\n".join(lines) + "\n"))


def _metrics(metrics: dict[str, Any]) -> str:
    exits = metrics.get("exits", [])
    if not exits:
        return "Not measured."
    names = [name for name in exits[0] if name != "exit"]
    rows = [[str(row["exit"])] + [f"{row[name]:.3f}" for name in names] for row in exits]
    rest = "\n".join(f"- {key}: {value:.3f}" for key, value in metrics.items() if isinstance(value, float))
    return _table(["exit", *names], rows) + ("\n\n" + rest if rest else "")


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
