"""What a job would need and do, computed before it runs: its inputs, its nodes, its memory."""
