"""``tlt ablate``: the same job with the drafter left out, frozen and trained in several ways, and what that changes."""
