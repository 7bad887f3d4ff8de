"""Training steps to graphs: captures in a fake world, `torch.compile` backends, and what a cluster has logged."""
