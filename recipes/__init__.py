"""YAML recipes, shipped as package data."""

from importlib import resources


def read_recipe_file(name: str) -> str:
    """Text of a packaged file, by its path below this folder."""
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")


def recipe_names(folder: str) -> list[str]:
    """Names of the packaged recipes in one folder below this one."""
    files = resources.files(__name__).joinpath(folder).iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))
