"""Reports of a run, for people and for programs: text, JSON, page, trace, explanations and sweeps."""
