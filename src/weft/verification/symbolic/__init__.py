"""The symbolic proof that two graphs compute the same values."""
