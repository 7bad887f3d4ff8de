"""Random graphs, listings and programs: the only home of generators.

A listing (`listings.py`) is a random SPMD program that mixes several groups, dtypes, views, writes, draws, dependent
collectives in all their forms, repeated waits, results that escape, and collectives in flight. The other modules
generate what one kind of test needs. Each module is named after what it generates.
"""
