"""Gluon's kernels on CPU tensors, for truth and debugging: `run`.

The source is the one that is compiled; its language is this package. What hardware does by itself is here, too: loads
that land later, products that go on while their warpgroup does, mbarriers with their phases and bytes, partitions in
any order. What nothing orders is an error, whatever the order was; so are layouts that Gluon's compiler would not take.

Not here: time, registers, and what compilers make of the source. Programs run one after another, so nothing is said of
what they do to each other's memory; the threads of a partition are one; and no buffer's memory is used again.
"""

from multiattn.triton.cpu.gluon.run import run

__all__ = ["run"]
