"""What a launch of an emitted forward kernel hands to the driver: one struct. Pure Python: no compiler."""

from __future__ import annotations

from collections.abc import Mapping

from multiattn import abi
from multiattn.backend import Plan
from multiattn.cuda.launches import launches_of, params_of
from multiattn.cuda.params import ForwardParams
from multiattn.problem import VECTOR_BYTES

_POINTERS = ("q", "k", "v", "out", "lse")


def bind(plan: Plan, image: abi.Image, emitted: Mapping[str, str] | None = None) -> abi.Binding:
    """The Binding of a forward Plan.

    Args:
        plan: for the tensors at hand, with variant and config of the kernel.
        image: of the kernel, as `image_of` has it.
        emitted: what the kernel's code is specialised on; None while it is being emitted.
    """
    emitted = emitted or {}
    problem = plan.problem
    (launch,) = launches_of(plan)
    constants: dict[str, str] = {}
    abi.exactly(constants, dtype=problem.dtype, head_dim=problem.head_dim, causal=problem.causal)
    is_aligned = problem.alignment % VECTOR_BYTES == 0
    abi.flag(constants, emitted, "unaligned", not is_aligned)
    pointers = {getattr(ForwardParams, name).offset: name for name in _POINTERS}
    return abi.Binding(
        arguments=(abi.Struct(data=bytes(params_of(plan)), pointers=pointers),),
        grid=(launch.blocks, 1, 1),
        image=image,
        constants=constants,
    )


def image_of(plan: Plan) -> abi.Image:
    """How a block of the kernel of a forward Plan is started: known without compiling it."""
    (launch,) = launches_of(plan)
    return abi.Image(threads=launch.kernel.threads, dynamic_smem_bytes=launch.kernel.smem_bytes)
