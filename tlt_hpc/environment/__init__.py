"""What a run runs on, as its start finds it. Knows no torch, and starts no process: a rank must not."""
