"""The benches: tokens per second against transformers, and accept length against other ways to verify drafts."""
