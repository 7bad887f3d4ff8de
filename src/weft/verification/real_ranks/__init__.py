"""Real gloo processes that run graphs."""
