"""What runs the kernels' own source on CPU tensors."""
