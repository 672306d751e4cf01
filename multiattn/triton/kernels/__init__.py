"""The kernels, as the compilers get them."""
