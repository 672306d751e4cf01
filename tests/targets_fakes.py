"""Compile tables with no compiler: entries of made-up kernels."""

from multiattn.inspect.build import Entry
from multiattn.inspect.cells import Cell
from multiattn.inspect.facts import Facts
from multiattn.inspect.mix import Counts, Mix
from multiattn.plan.support import Reason

HOT = Counts(
    classes={"HGMMA": 16, "FP32": 160, "INT": 32, "MUFU.EX2": 32, "UTMALDG": 2, "SYNCS": 4},
    tensor_names={"HGMMA.64x128x16.F32.BF16": 16},
)


def facts(kernel="attention", **changes):
    """A Hopper kernel without a fault."""
    values = {
        "threads": 128,
        "registers": 168,
        "stack_bytes": 0,
        "static_smem_bytes": 0,
        "dynamic_smem_bytes": 65536,
        "blocks": 3,
        "share": 0.1875,
        "limiter": "registers",
        "hot_loops": 2,
        "hot_spills": 0,
        "other_spills": 0,
        "cubin_bytes": 20000,
        "seconds": 1.5,
        "mix": Mix(code=HOT, hot=HOT, loops=(HOT,), code_bytes=4096),
    }
    return Facts(kernel=kernel, **{**values, **changes})


def entry(backend="cuda", arch="sm90", *, kernels=None, **cell):
    """What came of a cell: a kernel without a fault, where nothing else is said."""
    kernels = (facts(),) if kernels is None else tuple(kernels)
    return Entry(
        cell=Cell(backend=backend, arch=arch, **cell), variant="full", config="tile_m=64", why="", kernels=kernels
    )


def refused(backend="cuda", arch="sm86", **cell):
    """A cell that a backend refuses."""
    reason = Reason(code="arch", got=arch, allowed="sm90")
    return Entry(cell=Cell(backend=backend, arch=arch, **cell), reasons=(reason,))


def failed(backend="cuda", arch="sm80", **cell):
    """A cell whose compiler failed."""
    return Entry(cell=Cell(backend=backend, arch=arch, **cell), error="RuntimeError: ptxas: out of luck")
