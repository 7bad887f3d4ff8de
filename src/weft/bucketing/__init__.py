"""Merging collectives into buckets: eligibility, grouping, placement, prices, and building the merged graph."""
