"""Compares a planned step with plain PyTorch.

Gets a module and a planned step; gives a verdict with the first difference. Read eager.py (the
plain twin), fingerprint.py and values.py (what is kept of its tensors), contents.py (what no
version tells of them), agreement.py (where plain PyTorch differs from itself), deterministic.py
(where bits can be demanded), rounding.py (for compiled steps).
"""
