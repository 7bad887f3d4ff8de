"""Local rewrites: drafts, patterns, rules, and the questions that rewriting passes ask."""
