"""The forward kernel for Hopper in Gluon, Triton's language for one warp group at a time."""
