"""Passes that move, merge and remove collectives."""
