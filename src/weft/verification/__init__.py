"""Witnesses that a rewritten graph computes the same values on every rank."""
