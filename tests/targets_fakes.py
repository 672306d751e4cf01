"""Compile tables with no compiler: entries of made-up kernels."""

from multiattn.inspect.build import Compilation, Request
from multiattn.inspect.facts import Facts
from multiattn.inspect.mix import Counts
from multiattn.inspect.options import layer
from multiattn.plan.support import Reason

HOT = Counts(
    classes={"HGMMA": 16, "FP32": 160, "INT": 32, "MUFU.EX2": 32, "UTMALDG": 2, "SYNCS": 4},
    tensor_names={"HGMMA.64x128x16.F32.BF16": 16},
)


def facts(kernel="attention", *, spills=0, **changes):
    """A Hopper kernel without a fault, or with some spills in its hot loops."""
    hot = Counts(classes={**HOT.classes, "LDL": spills}, tensor_names=HOT.tensor_names)
    values = {
        **{"threads": 128, "registers": 168, "stack_bytes": 0, "static_smem_bytes": 0, "dynamic_smem_bytes": 65536},
        **{"blocks": 3, "share": 0.1875, "limiter": "registers", "seconds": 1.5},
        **{"code": hot, "hot": hot, "hot_loops": 2, "code_bytes": 4096},
    }
    return Facts(kernel=kernel, **{**values, **changes})


def request(backend="cuda", arch="sm90", *, direction="forward", head_dim=128, mask="causal", variant=None):
    """A request at 4k tokens."""
    problem = layer(head_dim, 4096, mask)
    return Request(backend=backend, arch=arch, direction=direction, problem=problem, variant=variant)


def entry(backend="cuda", arch="sm90", *, kernels=None, **asked):
    """The outcome of a request: a kernel without a fault, where nothing else is said."""
    kernels = (facts(),) if kernels is None else tuple(kernels)
    wanted = request(backend, arch, **asked)
    return Compilation(request=wanted, variant="full", config="tile_m=64", kernels=kernels)


def refused(backend="cuda", arch="sm86", **asked):
    """A request that a backend refuses."""
    reason = Reason(code="arch", got=arch, allowed="sm90")
    return Compilation(request=request(backend, arch, **asked), reasons=(reason,))


def failed(backend="cuda", arch="sm80", **asked):
    """A request whose compiler failed."""
    return Compilation(request=request(backend, arch, **asked), error="RuntimeError: ptxas: out of luck")
