"""Pictures of what ``analysis`` finds, alike in light and dark. Knows matplotlib and no file of a run."""
