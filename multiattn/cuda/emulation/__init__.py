"""The CUDA kernels' source on the CPU: C++ that emulates a thread block, and `host`, which builds and calls it."""
