"""The kernels, forward and backward, and what they are made of."""
