"""The map between folders and import names, and who may import whom."""

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {"hispec": "hispec", "hispec.train": "train", "hispec.decode": "decode"}
ALLOWED = {
    "hispec": {"hispec", "hispec.recipes"},
    "hispec.train": {"hispec", "hispec.train", "hispec.decode"},
    "hispec.decode": {"hispec", "hispec.decode", "hispec.recipes"},
}
# The only places where names of other rooms stand in the contract: loaded when first asked for.
LAZY = {("hispec/__init__.py", "hispec.decode")}
# Prompts of a benchmark that come from the Hub: imported when they are asked for, and only then.
ON_DEMAND = {("prompt_sets.py", "datasets")}
# Foreign engines, and what no decoding install has.
FOREIGN = {"deepspeed", "datasets", "wandb", "tensorboard", "hydra", "omegaconf"}


def room_of(module: str) -> str:
    parts = module.split(".")
    known = {"hispec.train", "hispec.decode", "hispec.recipes"}
    return name if (name := ".".join(parts[:2])) in known else parts[0]


def imports(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_only_what_it_may(room: str) -> None:
    for path in sorted((ROOT / ROOMS[room]).glob("*.py")):
        for target in map(room_of, imports(path)):
            if target.startswith("hispec") and (f"{ROOMS[room]}/{path.name}", target) not in LAZY:
                assert target in ALLOWED[room], f"{path.name} imports {target}"


@pytest.mark.parametrize("room", ["hispec", "decode"])
def test_a_decoding_install_needs_no_training_library(room: str) -> None:
    for path in sorted((ROOT / room).glob("*.py")):
        foreign = FOREIGN & {name.split(".")[0] for name in imports(path)}
        assert foreign <= {name for file, name in ON_DEMAND if file == path.name}, path.name


@pytest.mark.parametrize("name", ["deepspeed", "datasets", "wandb", "tensorboard", "matplotlib"])
def test_each_foreign_engine_has_one_file(name: str) -> None:
    homes = [path.name for path in (ROOT / "train").glob("*.py") if any(name in i.split(".") for i in imports(path))]
    assert len(homes) <= 1, homes


@pytest.mark.parametrize("room", ["train", "decode", "recipes"])
def test_checkout_links_every_room(room: str) -> None:
    assert (ROOT / "hispec" / room).resolve() == ROOT / room


@pytest.mark.parametrize("room", ["train", "decode", "recipes"])
def test_no_unlisted_subpackage(room: str) -> None:
    assert not list((ROOT / room).glob("*/__init__.py")), "list it in pyproject packages"
    assert importlib.util.find_spec(f"hispec.{room}")
