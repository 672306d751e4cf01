"""The CUDA kernels' source on the CPU: C++ that emulates thread blocks, and `host`, which builds and runs it."""
