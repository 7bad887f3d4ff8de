"""Proved lower bounds on the step time, their certificates, and an independent checker."""
