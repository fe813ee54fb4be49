"""The watch: what each rank tells of itself while it runs, and who ends a job that has come to a standstill.

Independent of MPI and of what the ranks compute. Empty on purpose, so that any package can import ``beat`` at no cost.
"""
