"""The kernels' own source on CPU tensors."""
