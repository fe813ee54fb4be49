"""The policy step: advantages, losses, and DeepSpeed, which no other package imports."""

import os
import warnings

import torch

# DeepSpeed guesses its accelerator at import, aloud on every rank; and it calls torch by names that torch deprecates
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
