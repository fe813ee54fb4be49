"""Reads and shows runs: metrics, environment, energy, trackers, analyses, figures, ``tlt report`` and ``tlt watch``."""
