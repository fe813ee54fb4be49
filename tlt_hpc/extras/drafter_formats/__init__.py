"""Drafters in the files of other engines: read as ``drafter.init``, written by ``tlt export-drafter``."""
