"""Steps between forward and backward, by how gradients come: on one rail, in parts, by hooks.

Gets an executable and the tensors of a call; keeps what is saved until the backward has used it.
Read running_step.py with saved_tensors.py first; the other files are steps with hidden states, or
with many outputs.
"""
