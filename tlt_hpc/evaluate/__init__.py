"""Judges a policy on data sets: answers every prompt greedily and by sampling, with all ranks; can be resumed."""
