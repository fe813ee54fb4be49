"""The rollout engine: shared-noise sampling, the tie guard, the cache of keys and values, strategy and scheduling."""
