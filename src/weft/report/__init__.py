"""What was done and what was declined, for people and for programs."""
