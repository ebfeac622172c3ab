"""Benchmarks of planners and solvers alone.

Gets recorded instances or networks; gives rows. Read instances.py (networks as the planners see
them) and solvers.py (every solver on them), then flops_by_budget.py (FLOPs against
memory), phases.py (where planning spends its seconds) and rotor_dp.py (rotor's program and a
textbook's).
"""
