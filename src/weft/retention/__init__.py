"""Which values stay in memory for the late part of a step, and which are rebuilt there."""
