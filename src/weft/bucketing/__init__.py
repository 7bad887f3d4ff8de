"""Buckets: merging collectives of one group into one launch.

1. `eligibility` reads a collective as a member with a key, or says why no bucket can take it.
2. `policy` says what a bucket should hold: size limits, modules, roles, pinned and forbidden launches.
3. `engine` fills the buckets, checks dependencies and writes, and records a decision for every collective.
4. `placement` chooses where a bucket is launched and waited for; `prologues` finds casts that one packing can absorb.
5. `build` replaces the members by the nodes of the bucket; `pack` is Weft's operator that packs mixed dtypes.
6. `prices` tells the scheduler how long several launches would take as one.
"""
