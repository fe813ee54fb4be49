"""Checkpoints on disk: named tensors and JSON in, the same out. Knows no model and no optimiser."""
