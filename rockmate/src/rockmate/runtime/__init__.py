"""Run planned steps under autograd.

Gets a compiled step program of rkgb and gives what `Rockmate.forward` returns. Read execute.py
(one step), rails.py (how gradients reach autograd), module_state.py (the module as planned, and
its tensors now), network_problem.py (facts of a graph as a problem), eager.py (plain PyTorch).
"""
