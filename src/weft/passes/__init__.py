"""Passes, each in a file named after its class; its CLI name, golden file and docs page have the same name."""
