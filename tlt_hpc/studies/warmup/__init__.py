"""``tlt warmup``: a drafter trained before any reinforcement learning, on the model's own responses."""
