"""Example models, small to large, under every parallelism, for tutorials, tests and benchmarks."""

from weft.zoo.catalog import build, load, names

__all__ = ["build", "load", "names"]
