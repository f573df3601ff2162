"""What a run counted: passes, rows and verdicts per level, and the figures made of them."""

from dataclasses import dataclass, field


@dataclass
class LevelStats:
    """Counts of one level."""

    exit: int
    """Trunk layers behind its head."""
    passes: int = 0
    """Steps it ran."""
    rows: int = 0
    """Tokens that went through its layers."""
    accepted: int = 0
    """Tokens of the level below that it let stand."""
    rejected: int = 0
    """Tokens of the level below that it replaced."""

    @property
    def acceptance(self) -> float | None:
        """Share of judged tokens that stood; None if it judged none."""
        judged = self.accepted + self.rejected
        return self.accepted / judged if judged else None


@dataclass
class Stats:
    """Counts of one call of `generate`."""

    levels: list[LevelStats]
    prompts: int = 0
    """Requests finished."""
    tokens: int = 0
    """Tokens generated."""
    prefills: int = 0
    """Passes of the last level that served prompts only."""
    verdicts: int = 0
    """Times the last level decided for one sequence, prompts left out."""
    seconds: float = 0.0
    """Wall time."""
    finish_reasons: dict[str, int] = field(default_factory=dict)
    """How the requests ended."""

    @property
    def full_passes(self) -> int:
        """Passes of the last level, those that served prompts only left out."""
        return self.levels[-1].passes - self.prefills

    @property
    def tokens_per_full_pass(self) -> float | None:
        """Tokens that one full pass of one sequence yields, the first after the prompt left out; None without any."""
        # In a batch one pass serves many sequences; per sequence it is one verdict of the last level.
        return (self.tokens - self.prompts) / self.verdicts if self.verdicts else None

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens by wall time, prompts' time included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def report(self) -> str:
        """A few lines for a person."""
        lines = [f"{self.tokens} tokens, {self.tokens_per_second:.1f} tokens/s, {self.full_passes} full passes"]
        if self.tokens_per_full_pass is not None:
            lines[0] += f", {self.tokens_per_full_pass:.2f} tokens per full pass"
        for number, level in enumerate(self.levels):
            acceptance = "" if level.acceptance is None else f", accepted {level.acceptance:.1%} of what it judged"
            lines.append(f"  level {number} (exit {level.exit}): {level.passes} passes, {level.rows} rows{acceptance}")
        return "\n".join(lines)
