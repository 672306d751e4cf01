"""The Binding of an emitted forward kernel: one struct. Pure Python: no compiler."""

from __future__ import annotations

from collections.abc import Mapping

from multiattn.cuda.instances import launches_of
from multiattn.cuda.params import argument_of
from multiattn.layout import VECTOR_BYTES
from multiattn.plan import abi
from multiattn.plan.backend import Plan
from multiattn.plan.schedule import most_multiprocessors


def bind(plan: Plan, image: abi.Image, emitted: Mapping[str, str] | None = None) -> abi.Binding:
    """The Binding of a forward Plan.

    Args:
        plan: for the tensors at hand, with variant and config of the kernel.
        image: of the kernel, as `PlannedLaunch.image` has it.
        emitted: what the kernel's code is specialised on; None while it is being emitted.

    ValueError for a packed batch, whose tiles are listed by a kernel of its own.
    """
    problem = plan.problem
    if problem.packing is not None:
        raise ValueError(f"packing: got a packed batch of {problem.packing.sequences} sequences; allowed [B, H, S, D]")
    (launch,) = launches_of(plan)
    constants: dict[str, str] = {}
    abi.exactly(constants, dtype=problem.dtype, head_dim=problem.head_dim, mask=problem.band.kind)
    if problem.has_sinks:
        abi.exactly(constants, sinks="one a head")
    if problem.row_max:
        abi.exactly(constants, row_max="one a row")
    if problem.score is not None:
        abi.exactly(constants, score=problem.score.program.digest)
    if problem.blocks is not None:
        abi.exactly(constants, block_mask=str(tuple(problem.blocks)))
    if not launch.kernel.arch_features:
        abi.flag(constants, emitted or {}, "unaligned", problem.alignment % VECTOR_BYTES != 0)
    return abi.Binding(
        arguments=(argument_of(launch, plan),),
        grid=(launch.grid(most_multiprocessors(plan.arch)), 1, 1),
        image=image,
        constants=constants,
        workspace_bytes=plan.workspace_bytes,
    )
