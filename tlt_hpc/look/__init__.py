"""Reads and shows runs: metrics, environment, trackers, cost, ``tlt runs`` and ``tlt watch``."""
