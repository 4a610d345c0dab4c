"""Launches one library built from forward.cu a few times, for a profiler.

launch_once.py LIBRARY HEAD_DIM [causal]
"""

import sys

import torch
from library import Library, Problem

d = int(sys.argv[2])
q, k, v = (torch.randn(2, 8192, 2048 // d, d, device="cuda").to(torch.bfloat16) for _ in range(3))
problem = Problem(q, k, v, -1, 0 if sys.argv[3:] == ["causal"] else -1)
launch = Library(sys.argv[1]).call(problem, torch.empty_like(q))
for _ in range(3):
    launch()
torch.cuda.synchronize()
