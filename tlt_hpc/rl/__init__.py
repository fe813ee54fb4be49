"""The policy step: rewards, advantages, the loss and the DeepSpeed engine round the model. Knows no decoding."""
