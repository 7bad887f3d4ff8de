"""Decisions as data, and how good ones are found."""
