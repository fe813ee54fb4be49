"""Tells TensorBoard and Weights & Biases of steps, where they are asked for: the only importer of both."""
