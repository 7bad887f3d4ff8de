"""Advice: which layout to train a model with on a cluster."""
