"""Steps between forward and backward, by how gradients come: on one rail, in parts, by hooks."""
