"""The virtual cluster: all ranks in one process."""
