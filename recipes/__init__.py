"""YAML recipes, shipped as package data."""

from importlib import resources


def read_recipe_file(name: str) -> str:
    """Text of a packaged file, by its path below this folder."""
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
