"""The parts of ``tools/faults.py``: a module for each kind of fault, and what they share.

``runs`` starts a run, reads what it has left and compares it with a run that nothing happened to; ``results`` has the
line of each case and the table. The kinds are ``moments``, ``system_calls``, ``power_loss``, ``inputs``, ``folders``.
"""
