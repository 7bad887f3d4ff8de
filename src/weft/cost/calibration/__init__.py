"""Fit a cluster description to measurements: nccl-tests tables and profiler traces."""
