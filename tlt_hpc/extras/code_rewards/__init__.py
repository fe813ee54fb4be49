"""The reward kind ``code``: programs judged by unit tests, run in a sandbox."""
