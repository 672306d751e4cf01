"""Which config each kernel takes, with the evidence: `hopper` for wgmma and TMA, `ampere` for mma.sync on every GPU."""
