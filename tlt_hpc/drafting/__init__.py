"""Training the drafter in the tail: what to train on, how it is packed, the loss, the trainer and its merge."""
