"""The ways to run a collective and its products together."""
