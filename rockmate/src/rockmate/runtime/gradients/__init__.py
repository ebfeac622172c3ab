"""How gradients reach autograd: rails that hand them over, and sums for leaves that many use."""
