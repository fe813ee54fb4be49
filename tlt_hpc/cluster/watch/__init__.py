"""The watch: what each rank tells of itself while it runs, and who ends a job that has come to a standstill.

Knows neither MPI nor what the ranks compute. Empty on purpose, so that any floor can import ``beat`` at no cost.
"""
