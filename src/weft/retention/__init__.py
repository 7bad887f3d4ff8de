"""Which values stay in memory between the early and the late part of a step, and which are made again."""
