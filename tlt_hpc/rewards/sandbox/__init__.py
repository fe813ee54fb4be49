"""Where programs that a model wrote are run: hostile until the opposite is shown, which is never asked for.

Nothing that judges is inside. A judge outside (``code.py``) sends a program and an input, gets back what it wrote, and
compares; the answers never enter. Inside (``inside.py``) is process 1 of its own user, mount, process, network and IPC
namespaces, with an empty read-only root; the program runs in a fork of it, behind a filter of system calls. Assertions
run in another sandbox than the program (``assertions.py``).
"""
