"""What one training step costs beside plain PyTorch: the body of `step.py`.

Gets one or two checkouts; gives rows, a table and a picture. Read cases.py (what is measured),
worker.py (one checkout), turns.py (checkouts in turn), then table.py and figure.py.
"""
