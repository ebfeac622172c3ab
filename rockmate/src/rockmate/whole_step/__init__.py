"""Where each byte of a whole training step goes, and what is left of a device to activations.

Gets the memory that a step may take in all, an optimizer, a module and a call of it; gives a
`Memory`. Read optimizers.py (what an optimizer keeps, and takes while it steps), outputs.py (what a
call hands out, and a loss outside makes of it), loss_seen.py (what it has taken in a step), loss.py
(one that is planned with the module) and memory.py (the table, its least, its refusal);
whole_step.py puts them together, with what a device holds beside tensors.
"""

from rockmate.whole_step.optimizers import optimizer_bytes

__all__ = ["optimizer_bytes"]
