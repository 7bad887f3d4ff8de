"""Predictions of training steps: throughput, utilisation, memory by name, and how far each figure may be off."""
