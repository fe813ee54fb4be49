"""Fused kernels and CUDA graphs of the hot path: tensors in, tensors out. Knows no model, no cache, no request."""
