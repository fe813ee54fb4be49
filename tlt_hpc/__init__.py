"""Reinforcement learning of reasoning models under MPI, with speculative rollouts whose drafter is trained in the tail."""

__version__ = "0.1.0"
