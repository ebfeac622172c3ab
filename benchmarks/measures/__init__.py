"""What is measured at a point, and what is compared there.

Gets the arguments of a point; gives its row. Read strategies.py (ways to train in less memory) on
torch_compile.py, then training.py (steps) and planning.py (plans). Every function runs in a process
of its own, by name: see `harness.worker`.
"""
