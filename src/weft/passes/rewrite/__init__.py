"""Passes that clean the graph around the collectives."""
