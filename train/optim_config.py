"""How heads learn: the settings under `train`."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hispec.config import Config


class LossWeights(Config):
    """How much each loss counts; 0 leaves it out."""

    kl: float = Field(default=0.0, ge=0.0)
    """Kullback-Leibler divergence of the head from its teacher."""
    reverse_kl: float = Field(default=0.0, ge=0.0)
    """The same the other way round."""
    jsd: float = Field(default=0.0, ge=0.0)
    """Jensen-Shannon divergence: both from their mean."""
    tv: float = Field(default=0.0, ge=0.0)
    """Total variation: the chance that a sampled draft is rejected."""
    acceptance: float = Field(default=0.0, ge=0.0)
    """-log of sum min(p, q), the chance that a sampled draft is accepted."""
    ce: float = Field(default=0.0, ge=0.0)
    """Cross-entropy on the data's own next token."""

    def weights(self) -> dict[str, float]:
        """By name of the loss."""
        return {name: float(getattr(self, name)) for name in LossWeights.model_fields}

    @model_validator(mode="after")
    def _some(self) -> Self:
        names = ", ".join(LossWeights.model_fields)
        if not any(self.weights().values()):
            raise ValueError(f"{names} are all 0, which leaves nothing to learn; give one of them a weight")
        return self


class LossConfig(LossWeights):
    """How a head is told apart from its teacher: a mix of losses."""

    kl: float = Field(default=1.0, ge=0.0)
    """Kullback-Leibler divergence of the head from its teacher."""
    final: LossWeights | None = None
    """Weights at the last step, towards which those above move evenly over the run; null: they stay."""
    teacher: Literal["full", "next"] | Annotated[float, Field(ge=0.0, le=1.0)] = "full"
    """full: the full model. next: the next level, which judges the head first. A number: its share in a mix of both."""
    temperature: float = Field(default=1.0, gt=0.0)
    """Softens both sides of kl, reverse_kl and jsd."""
    chunk: int = Field(default=256, ge=1)
    """Positions whose logits exist at one time: bounds memory, changes no number."""

    def weights_at(self, progress: float) -> dict[str, float]:
        """Weights when `progress` (0 to 1) of the run is behind."""
        first = self.weights()
        last = first if self.final is None else self.final.weights()
        return {name: first[name] + progress * (last[name] - first[name]) for name in first}

    @property
    def share_of_next(self) -> float:
        """Of the next level in the teacher."""
        return {"full": 0.0, "next": 1.0}[self.teacher] if isinstance(self.teacher, str) else self.teacher


class OptimConfig(Config):
    """Length, batch and step size."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: for the matrices of heads, and AdamW for the rest; needs zero=0."""
    lr: float = Field(default=1e-3, gt=0.0)
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """How it falls after the warm-up. wsd stays at the peak and falls linearly in the end."""
    cooldown: float = Field(default=0.2, gt=0.0, le=1.0)
    """Share of the steps after the warm-up in which wsd falls."""
    epochs: float = Field(default=1.0, gt=0.0)
    """Passes over the data; not used when max_steps is given."""
    max_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps."""
    micro_batch_tokens: int | None = Field(default=None, ge=2)
    """Tokens packed into one forward pass; null follows from the next two, or takes 2048."""
    accumulation: int | None = Field(default=None, ge=1)
    """Forward passes per optimizer step, on each rank; null follows from the other two, or takes 1."""
    global_batch_tokens: int | None = Field(default=None, ge=2)
    """Tokens per optimizer step, of all ranks; null is the product: micro batch x accumulation x ranks."""
    warmup: float = Field(default=0.05, ge=0.0, le=1.0)
    """Share of the steps in which the learning rate rises from 0."""
    final_lr: float = Field(default=0.05, ge=0.0, le=1.0)
    """Where the schedule ends, as a share of lr; constant does not fall."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Heads start at the logit lens, and zero is not a better place for their norms."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's averages."""
    ema: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Keep a running mean of the heads, of this decay (0.999, say), and export that; null exports them as they are."""
    clip: float = Field(default=1.0, ge=0.0)
    """Largest gradient norm; 0 does not clip."""
    seed: int = Field(default=0, ge=0)
    """Of the packing, the order of batches and sampled answers."""
    zero: int = Field(default=0, ge=0, le=3)
    """DeepSpeed's ZeRO stage: how much of the heads' state is split over ranks. On one rank nothing is."""
    offload: bool = False
    """Keep the optimizer's averages in main memory; needs zero=1 or more."""
    save_every: int = Field(default=100, ge=1)
    """Steps between checkpoints; Ctrl-C and SIGTERM save one more."""
    keep: int = Field(default=2, ge=1)
    """Checkpoints kept."""
    loss: LossConfig = Field(default_factory=LossConfig)
    """What is minimised."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.offload and self.zero == 0:
            raise ValueError("offload=true needs zero=1, 2 or 3; give one, or offload=false")
        if self.optimizer == "muon" and self.zero:
            raise ValueError(f"optimizer=muon needs whole matrices, which zero={self.zero} splits; give zero=0")
        return self
