"""Checkpoints on disk: named tensors and JSON in, the same out."""
