"""Writes a run's policy and its drafter for other programs: transformers, SGLang and vLLM."""
