"""Graphs as torch prints them, read back without executing anything."""
