"""Streaming a collective through the matrix products next to it: sites, layouts, chunks, profit and lowerings."""
