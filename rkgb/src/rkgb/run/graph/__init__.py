"""Which graph is run: fewer views, gradients in memory that is free, and what a call lets go."""
