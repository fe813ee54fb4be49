"""Writes a trained drafter for other engines: SGLang, vLLM, the speculators library and EAGLE's own code."""
