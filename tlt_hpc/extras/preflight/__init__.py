"""Finds before a job what would end it: on the login node by command, on each node when the job starts."""
