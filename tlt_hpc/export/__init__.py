"""Writes a run's policy for other programs: transformers, SGLang and vLLM. The drafter: ``extras.drafter_formats``."""
