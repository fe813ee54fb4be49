"""Prompts and the tasks they come from."""
