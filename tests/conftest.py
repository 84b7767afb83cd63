"""One thread for all tests of a CPU: their tensors are tiny, so threads wait for each other longer than they work. And
the first exponentials and logarithms of a process before any test: seen twice in many runs under load, and not
reproduced alone, the first ones were off by 2^-14 of themselves, which equality with other code does not forgive."""

import torch

if not torch.cuda.is_available():  # a GPU's results are compared with larger ones of the CPU
    torch.set_num_threads(1)
    for size in (64, 1 << 16):
        once = torch.ones(size)
        for function in (torch.exp, torch.exp2, torch.log, torch.softmax):
            function(once, 0) if function is torch.softmax else function(once)
