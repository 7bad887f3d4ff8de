"""Example models, small to large, under every parallelism: what Weft is shown, tested and measured on."""

from weft.zoo.catalog import build, load, names

__all__ = ["build", "load", "names"]
