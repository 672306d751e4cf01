"""multiattn: the same fused attention in Triton, NVIDIA cuTile and raw CUDA, behind one call.

Importing this package imports no kernel language and asks no driver; a backend does both when it is first used.
"""

from multiattn import nn
from multiattn.api import backends, explain, fmha, fmha_backward
from multiattn.blocks import block_mask, document_mask
from multiattn.flex import flex_attention
from multiattn.kvcache import fmha_kvcache
from multiattn.merging import merge, merge_all
from multiattn.plan.backend import BACKENDS, Plan
from multiattn.plan.support import Reason, Unsupported
from multiattn.problem import Problem
from multiattn.quantizing import quantize_cache
from multiattn.reference import reference, reference_backward
from multiattn.run.execute import launch, launch_backward
from multiattn.varlen import fmha_varlen, fmha_varlen_backward

__version__ = "0.1.0"
__all__ = [
    "BACKENDS",
    "Plan",
    "Problem",
    "Reason",
    "Unsupported",
    "backends",
    "block_mask",
    "document_mask",
    "explain",
    "flex_attention",
    "fmha",
    "fmha_backward",
    "fmha_kvcache",
    "fmha_varlen",
    "fmha_varlen_backward",
    "launch",
    "launch_backward",
    "merge",
    "merge_all",
    "nn",
    "quantize_cache",
    "reference",
    "reference_backward",
]


def __dir__() -> list[str]:
    """The public names, with packages that have more of them once they are imported."""
    return ["__version__", *__all__, *globals().keys() & {"aot", "integrations"}]
