"""hispec-train: a recipe and overrides in, a heads folder out. Nothing heavy is imported before it is needed."""

import atexit
import importlib.util
import logging
import os
import sys
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from hispec.config import known_keys, unknown_key
from hispec.errors import ConfigError, HiSpecError, command
from hispec.train.config import TrainConfig

HELP = """\
hispec-train recipe=NAME [key=value ...]   train heads; the same command goes on where a run was stopped
hispec-train recipe=NAME plan=true         print what would run, and stop
hispec-train recipe=NAME --cfg job         print the whole configuration, and stop
hispec-train recipes                       list recipes

  recipe=NAME         a packaged recipe, or one of --config-dir
  --config-dir DIR    folder with recipes of your own, which may build on others: `defaults: [smollm2-135m, _self_]`
  key=value           change a setting of the recipe; lists are written [4,8], text with spaces or commas in quotes
  exits=auto          choose the exits by a short calibration on the run's own data, before training

examples
  hispec-train recipe=tiny
  hispec-train recipe=smollm2-135m train.lr=1e-3 exits=[4,8] run_dir=runs/mine
  hispec-train recipe=smollm2-135m model=HuggingFaceTB/SmolLM2-135M-Instruct 'data.source=[chats.jsonl]'

settings (reasons: the comments of the recipes, and hispec/train/*config.py)
"""


def run(argv: list[str]) -> None:
    """The command, from its words.

    Raises:
        HiSpecError: the user's own mistakes. Interrupted: stopped by a signal, and saved.
    """
    words, own, only_show = _split(argv)
    if not words or any(word in ("-h", "--help", "help") for word in words):
        print(HELP + "\n".join(f"  {key}" for key in known_keys(TrainConfig)))
        return
    if words[0] == "recipes":
        for name, path in sorted(_recipes(own).items()):
            print(f"{name:20s} {_first_line(path)}")
        return
    if missing := [name for name in ("hydra", "deepspeed", "matplotlib") if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"training needs {' and '.join(missing)}; run: pip install 'hispec[train]'")
    config = load(words, own)
    if only_show:
        print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), end="")
        return
    # Only now what takes seconds to import.
    from hispec.train import launch, ranks

    if ranks.adopt():
        launch.check(config.launch)
    elif not config.plan and launch.needed(config.launch):
        sys.exit(launch.start(config.launch, argv))
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("hispec").setLevel(logging.INFO if ranks.rank() == 0 else logging.ERROR)
    try:
        _go(config)
    except HiSpecError as error:
        if ranks.rank() == 0:
            raise
        # What is wrong for all ranks the first one says; the launcher ends the others meanwhile.
        time.sleep(5)
        raise type(error)(f"rank {ranks.rank()}: {error}") from None
    atexit.register(ranks.leave)


def _go(config: TrainConfig) -> None:
    if config.plan:
        from hispec.train.plan import describe

        print("\n".join(describe(config)))
        return
    from hispec.train.loop import train

    train(config)


def load(words: Sequence[str], config_dir: Path | None = None) -> TrainConfig:
    """The settings that `recipe=NAME key=value ...` stand for.

    Raises:
        ConfigError: no such recipe or key, or a value that is not legal.
    """
    named = [word.partition("=")[2] for word in words if word.startswith("recipe=")]
    recipes = _recipes(config_dir)
    if len(named) != 1:
        raise ConfigError(f"give one recipe=NAME; there are: {', '.join(sorted(recipes))}")
    if named[0] not in recipes:
        raise ConfigError(
            unknown_key(named[0], recipes).replace("unknown key", "unknown recipe").replace("known keys", "there are")
        )
    overrides = [word for word in words if not word.startswith("recipe=")]
    for word in overrides:
        if "=" not in word and not word.startswith("~"):
            raise ConfigError(f"{word!r} is not a setting; settings are written key=value, see --help")
    values = _compose(recipes[named[0]], named[0], overrides)
    values.setdefault("run_dir", f"runs/{named[0]}")
    return TrainConfig.build(values)


def _compose(path: Path, name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Recipe and overrides through Hydra, as plain values."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    # A key that the recipe leaves at its default may be given without Hydra's `+`; the schema finds unknown ones.
    forced = [word if word.startswith(("+", "~")) else f"++{word}" for word in overrides]
    search = f"hydra.searchpath=[file://{_packaged()}]"
    try:
        with initialize_config_dir(str(path.parent.resolve()), version_base="1.3"):
            composed = compose(name, overrides=[*forced, search])
        values: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"recipe {name!r} and its overrides cannot be read: {line}") from None
    result: dict[str, Any] = values
    return result


def _split(argv: Sequence[str]) -> tuple[list[str], Path | None, bool]:
    """Take out --config-dir and --cfg (Hydra's), and the --local_rank that the deepspeed launcher adds.

    Raises:
        ConfigError: an unknown option, or a folder that is not there.
    """
    words: list[str] = []
    folder: Path | None = None
    only_show = False
    rest = iter(argv)
    for word in rest:
        name, equals, value = word.partition("=")
        if name in ("--config-dir", "--config_dir"):
            folder = Path(value if equals else next(rest, ""))
            if not folder.is_dir():
                raise ConfigError(f"--config-dir {str(folder)!r} is not a folder")
        elif name in ("--cfg", "-c"):
            what = value if equals else next(rest, "")
            if what != "job":
                raise ConfigError(f"--cfg {what!r} is not known; legal: --cfg job")
            only_show = True
        elif name in ("--local_rank", "--local-rank"):
            os.environ.setdefault("LOCAL_RANK", value if equals else next(rest, "0"))
        elif word.startswith("-") and word not in ("-h", "--help"):
            raise ConfigError(
                f"unknown option {word!r}; options are --config-dir DIR, --cfg job and --help,"
                " settings are written key=value"
            )
        else:
            words.append(word)
    return words, folder, only_show


def _packaged() -> Path:
    return Path(str(files("hispec.recipes")))


def _recipes(own: Path | None) -> dict[str, Path]:
    """Recipes by name; one's own come before packaged ones."""
    folders = [_packaged(), *([own] if own is not None else [])]
    return {path.stem: path for folder in folders for path in folder.glob("*.yaml")}


def _first_line(path: Path) -> str:
    first = path.read_text().partition("\n")[0]
    return first.lstrip("# ") if first.startswith("#") else ""


main = command(run)

if __name__ == "__main__":
    main()
