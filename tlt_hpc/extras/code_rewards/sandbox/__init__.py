"""Where programs that a model wrote are run: hostile until the opposite is shown, which is never asked for.

Nothing that judges is inside. A judge outside (``code.py``) sends a program and an input, gets back what it wrote, and
compares; the answers never enter. A supervisor (``inside.py``) runs the program in a fork of itself, with limits
(``program.py``) and a filter of system calls (``seccomp.py``), behind walls of one of two kinds (``isolation.py``): the
supervisor is process 1 of its own namespaces, with an empty read-only root, or, where the system allows no such
namespaces, each program is in a Landlock domain. Assertions run in another sandbox than the program
(``assertions.py``).
"""
