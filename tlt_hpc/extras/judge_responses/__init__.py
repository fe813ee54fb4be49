"""Judges the responses of a file by the rules of a job."""
