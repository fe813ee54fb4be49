"""Parts that each serve one command, or one kind of reward or file; the core finds them by name, and runs without."""
