"""``tlt watch``: the state of a run, from its files."""
