"""Where graphs come from: captures in a fake world, `torch.compile` backends, logs and archives."""
