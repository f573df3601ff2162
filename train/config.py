"""The settings of a training run: what a recipe may hold, and why each is there."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from hispec.config import Config, HeadConfig, check_exits, check_repo_id, default_exits
from hispec.decode.policy import parse_policy
from hispec.errors import ConfigError
from hispec.train.data_config import DataConfig
from hispec.train.optim_config import OptimConfig

# Up to so many layers, the first is worth a try as an exit.
SHALLOW = 12


class CalibrationConfig(Config):
    """What exits=auto spends on its choice: a quick head at every candidate, measured on documents held apart."""

    candidates: list[int] | None = Field(default=None, min_length=1)
    """Layers to choose from; null takes about ten, the last at two thirds of the depth."""
    tokens: int = Field(default=16384, ge=2)
    """Tokens of the run's own data that quick heads learn from; a quarter as many are held apart to measure them on."""
    steps: int = Field(default=64, ge=1)
    """Optimizer steps of each quick head, which is of the recipe's kind."""


class EvalConfig(Config):
    """Measuring the heads on prompts they were not trained on."""

    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 evaluates at the end only."""
    prompts: str = "everyday"
    """Held-out prompts: the packaged list of this name, or a file of rows."""
    max_prompts: int = Field(default=8, ge=1)
    """Prompts used."""
    max_new_tokens: int = Field(default=64, ge=2)
    """Tokens the trunk answers each with."""
    policy: str = "fixed:2,4"
    """The decoder's policy, simulated and real: a fixed one, as a simulation has no costs to go by."""

    @field_validator("policy")
    @classmethod
    def _fixed(cls, value: str) -> str:
        if value == "auto":
            raise ValueError("'auto' cannot be simulated; give a fixed policy such as fixed:2,4")
        parse_policy(value, 2)
        return value


class WandbConfig(Config):
    """Weights & Biases; metrics.jsonl is written in any case."""

    mode: Literal["disabled", "offline", "online"] = "disabled"
    """offline needs no network; upload later with `wandb sync`."""
    project: str = "hispec"
    """Project name."""


class ExportConfig(Config):
    """Where finished heads go."""

    folder: str | None = None
    """On this machine; null takes run_dir/heads."""
    push: str | None = None
    """Also to this repository of the Hub, org/name; hispec-push does the same afterwards."""
    private: bool | None = None
    """Who can see a repository that is created: null is as the account has it."""
    revision: str | None = None
    """Branch to push to, created if it is not there; null is main."""

    @field_validator("push")
    @classmethod
    def _named(cls, value: str | None) -> str | None:
        return None if value is None else check_repo_id(value)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.push is None and (self.private is not None or self.revision is not None):
            raise ValueError("private and revision belong to a push; give export.push=org/name")
        return self


class TrunkConfig(Config):
    """How the frozen trunk lies on the ranks."""

    shard: Literal["none", "zero3"] = "none"
    """none: each rank holds it whole. zero3: for one that does not fit a GPU, each holds a part of every layer."""


class LaunchConfig(Config):
    """Starting ranks. Under deepspeed, torchrun, srun or mpirun the ranks are theirs, and this is left out."""

    ranks: int | None = Field(default=None, ge=1)
    """Ranks on this machine; null takes one per GPU, or one on a CPU."""
    hostfile: str | None = None
    """Machines, in lines `host slots=8`: so many ranks are started on each, over ssh (pdsh)..."""
    node_rank: int | None = Field(default=None, ge=0)
    """... or only those of the machine of this place in the hostfile, by the same command given on every machine."""
    master_addr: str | None = None
    """Where ranks of several machines meet; null takes the first of the hostfile."""
    master_port: int | None = Field(default=None, ge=1, le=65535)
    """The port there; null takes a free one, or 29500 with a hostfile."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.hostfile is None and (self.node_rank is not None or self.master_addr is not None):
            raise ValueError("node_rank and master_addr belong to a launch.hostfile; give one")
        if self.hostfile is not None and self.ranks is not None:
            raise ValueError("the hostfile says how many ranks each machine gets; leave out launch.ranks")
        return self


class NeedsConfig(Config):
    """The machine a recipe is made for: what a plan reckons with where there is no GPU."""

    ranks: int = Field(ge=1)
    """GPUs, each with a rank of its own."""
    memory: float = Field(gt=0.0)
    """GB on each."""


class TrainConfig(Config):
    """A recipe, complete."""

    model: str
    """The trunk: a folder, a Hub id, package:NAME, or tiny (a random model made on the spot)."""
    revision: str | None = None
    """Hub revision of the trunk."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The trunk's precision; null takes float32 on a CPU and bfloat16 on a GPU. Heads' weights are always float32."""
    trunk: TrunkConfig = Field(default_factory=TrunkConfig)
    """Whether every rank holds all of it."""
    needs: NeedsConfig | None = None
    """The machine this recipe is made for; null: any."""
    chat_template: str | None = None
    """File with a chat template that replaces the tokenizer's own."""
    exits: list[int] | Literal["auto"] | None = None
    """Trunk layers after which a head stands, from shallow to deep; null takes 1/8 and 1/4 of the depth; auto chooses
    by a short calibration before training: so many as there are heads listed, else two, or one where that is better."""
    calibration: CalibrationConfig = Field(default_factory=CalibrationConfig)
    """How exits=auto chooses."""
    head: HeadConfig = Field(default_factory=HeadConfig)
    """The head at every exit..."""
    heads: list[HeadConfig] | None = None
    """... unless each exit gets its own, listed in the order of the exits."""
    data: DataConfig
    """What the heads learn from."""
    train: OptimConfig = Field(default_factory=OptimConfig)
    """How they learn."""
    eval: EvalConfig = Field(default_factory=EvalConfig)
    """How they are measured."""
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    """Where curves go besides metrics.jsonl."""
    tensorboard: bool = False
    """Write curves for TensorBoard into the run folder, too."""
    run_dir: str
    """Folder of this run: settings, metrics, answers, features, checkpoints, report."""
    export: ExportConfig = Field(default_factory=ExportConfig)
    """Where the finished heads go; a folder alone will do."""
    resume: Literal["auto", "never"] = "auto"
    """auto goes on from the newest checkpoint in run_dir; never starts over and removes them."""
    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    """The ranks, where no launcher has started them."""
    plan: bool = False
    """Print what would run, and stop."""

    @field_validator("export", mode="before")
    @classmethod
    def _folder(cls, value: object) -> object:
        return {"folder": value} if isinstance(value, str) else value

    @field_validator("exits", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        if value in (None, "auto") or isinstance(value, list | tuple) and all(type(i) is int for i in value):
            return value
        raise ValueError("must be a list of layers such as [4,8], auto, or null")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.exits != "auto" and self.calibration != CalibrationConfig():
            raise ValueError("calibration belongs to exits=auto; give that, or leave calibration out")
        if self.exits == "auto" and self.heads == []:
            raise ValueError("heads=[] leaves exits=auto nothing to choose; list one head for each exit, or none")
        return self

    @property
    def heads_folder(self) -> Path:
        """Where the finished heads go."""
        return Path(self.export.folder or Path(self.run_dir) / "heads")

    def exits_for(self, n_layers: int) -> tuple[int, ...] | None:
        """The exits on a trunk of `n_layers`; None where calibration is to choose them.

        Raises:
            ConfigError: out of range, twice or not rising; or too few for calibration to choose from.
        """
        if self.exits == "auto":
            self.candidates_for(n_layers)
            return None
        return default_exits(n_layers) if self.exits is None else check_exits(self.exits, n_layers)

    def candidates_for(self, n_layers: int) -> tuple[int, ...]:
        """The exits that calibration chooses from; of itself it takes the default ones too. Raises as `exits_for`."""
        if self.calibration.candidates is not None:
            found = check_exits(self.calibration.candidates, n_layers, "calibration.candidates")
        else:
            first, last = (1 if n_layers <= SHALLOW else 2), 2 * n_layers // 3
            spread = {first + round(at * (last - first) / 7) for at in range(8)} if last > first else {first}
            found = tuple(sorted(e for e in spread | set(default_exits(n_layers)) if e < n_layers))
        needed = 1 if self.heads is None else len(self.heads)
        if len(found) < needed:
            raise ConfigError(
                f"exits=auto: {len(found)} candidates for {needed} exits in a model of {n_layers} layers;"
                " list fewer heads, or more calibration.candidates"
            )
        return found

    def heads_for(self, n_exits: int) -> list[HeadConfig]:
        """One head per exit. Raises ConfigError when the list does not match."""
        if self.heads is None:
            return [self.head] * n_exits
        if len(self.heads) != n_exits:
            raise ConfigError(
                f"heads: {len(self.heads)} given for {n_exits} exits; give one per exit, or only head=..."
            )
        return self.heads
