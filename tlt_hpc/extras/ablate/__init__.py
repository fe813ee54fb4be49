"""``tlt ablate``: the drafter left out, frozen and trained in several ways."""
