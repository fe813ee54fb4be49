"""A discrete-event model of training steps, in numpy: what a job would take on a number of nodes."""
