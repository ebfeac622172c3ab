"""Statements of a step, their order and drops (lowering.py), and the source that they become."""
