"""Run planned steps under autograd.

Gets a compiled step program of rkgb and gives what `Rockmate.forward` returns. Read execute.py
(one step) with executable.py, rails.py (how gradients reach autograd), shared_uses.py (gradients of
what a step uses several times), and plain.py (planned modules run as plain ones).
"""
