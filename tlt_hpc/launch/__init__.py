"""Starting ranks where no launcher did."""
