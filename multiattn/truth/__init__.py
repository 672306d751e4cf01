"""The truth in fp64, and how far from it a kernel may be: parity, bench and tuning go by it."""
