"""Training: a recipe in, a heads folder out."""
