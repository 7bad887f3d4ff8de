"""Lowerings: the ways to run a collective and its products together. `protocol` is their interface."""
