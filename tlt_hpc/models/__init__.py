"""Models: the rollout's decoder, the learned drafter, the n-gram drafter, and loading from Hugging Face folders."""
