"""A discrete-event model of training steps: what a cluster would take, before it is asked for. Pure numpy."""
