"""What of a run is saved and when, and how the next start restores it."""
