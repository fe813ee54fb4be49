"""What a job would need and do, computed before it runs: inputs, preflight, memory and time."""
