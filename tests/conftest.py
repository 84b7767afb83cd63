"""One thread for all tests of a CPU: their tensors are tiny, so threads wait for each other longer than they work."""

import torch

from determinism import settle_math

settle_math()
if not torch.cuda.is_available():  # a GPU's results are compared with larger ones of the CPU
    torch.set_num_threads(1)
