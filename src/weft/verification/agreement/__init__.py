"""Agreement: whether the graphs of all ranks can run together."""
