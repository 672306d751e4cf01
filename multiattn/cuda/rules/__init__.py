"""The configs that kernels take, with the evidence: `hopper` for wgmma and TMA, `ampere` for mma.sync on every GPU."""
