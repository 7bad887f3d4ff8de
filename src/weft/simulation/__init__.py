"""The simulator: the times, the memory and the timeline of a graph in a given order."""
