"""What fused and packed nodes run."""
