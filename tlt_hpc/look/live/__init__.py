"""``tlt watch``: what a run is at, from its files alone."""
