"""Decoding: a trunk with heads in, tokens out."""
