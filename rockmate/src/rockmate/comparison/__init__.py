"""Compares a planned step with plain PyTorch.

Gets a module and a planned step; gives the differences. Read eager.py (the plain copy and its
step), fingerprint.py (comparing tensors without keeping them), contents.py (changes without a new
version), agreement.py (nondeterministic kernels), deterministic.py (deterministic kernels),
rounding.py (compiled steps).
"""
