"""Proofs and tests that a rewritten graph computes the same values on every rank."""
