"""The Triton programs and their launches, imported only where they run. Knows no fallback and checks no argument."""
