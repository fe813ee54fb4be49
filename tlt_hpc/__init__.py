"""Reinforcement learning of reasoning models under MPI; the drafter that speeds it up is trained in the tail."""

__version__ = "0.1.0"
