"""How many bytes a run will take, by phase and part, before anything starts: from the configuration and a shape."""
