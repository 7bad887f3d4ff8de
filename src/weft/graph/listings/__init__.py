"""Listings: the graph as text, and back."""
