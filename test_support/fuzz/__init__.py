"""A search for differences between planned modules and plain PyTorch, that never ends by itself.

A seed becomes a case: a random network and a random training loop, as data. The case becomes a
short script; the script runs twice, plain and planned, and what the two runs show is compared bit
by bit. What differs is shrunk to a few lines and printed, ready to be pasted.

    $ make fuzz MINUTES=10 SEED=0

Read in this order: `case.py` (what a case is), `layers.py`, `layers_of_objects.py`,
`layers_that_read.py` and `events.py` (what it is drawn from), `drawing.py` (a seed becomes a case),
`script.py` (a case becomes a script), `journal.py` (what a run shows), `judging.py` (two runs
become a verdict), `shrinking.py`, `campaign.py` (many cases in two processes), `known.py` (what it
leaves out), `__main__.py`.
"""
