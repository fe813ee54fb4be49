"""Shared by all packages: records, errors, reading of files, and text for terminals."""
