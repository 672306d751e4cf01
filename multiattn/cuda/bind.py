"""What a launch of an emitted forward kernel hands to the driver: one struct. Pure Python: no compiler."""

from __future__ import annotations

from collections.abc import Mapping

from multiattn import abi
from multiattn.backend import Plan
from multiattn.cuda.launches import launches_of, params_of
from multiattn.cuda.params import ForwardParams, WgmmaParams, map_offset
from multiattn.cuda.tensor_maps import tensor_maps
from multiattn.cuda.wgmma_configs import WgmmaConfig
from multiattn.problem import VECTOR_BYTES
from multiattn.schedule import most_multiprocessors


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
    if isinstance(plan.config, WgmmaConfig):
        argument = _wgmma_struct(plan, plan.config)
    else:
        is_aligned = problem.alignment % VECTOR_BYTES == 0
        abi.flag(constants, emitted, "unaligned", not is_aligned)
        argument = abi.Struct(data=bytes(params_of(plan)), pointers=_pointers(0))
    blocks = launch.grid(most_multiprocessors(plan.arch)) if launch.is_persistent else launch.blocks
    return abi.Binding(
        arguments=(argument,),
        grid=(blocks, 1, 1),
        image=image,
        constants=constants,
        workspace_bytes=plan.workspace_bytes,
    )


def _pointers(base: int) -> dict[int, str]:
    """Where a ForwardParams at byte `base` has its pointers."""
    return {base + getattr(ForwardParams, name).offset: name for name in abi.TENSORS}


def _wgmma_struct(plan: Plan, config: WgmmaConfig) -> abi.Struct:
    pointers = _pointers(WgmmaParams.forward.offset)
    if plan.workspace_bytes:
        pointers[WgmmaParams.next_tile.offset] = abi.WORKSPACE
    maps = tensor_maps(plan.problem, config)
    return abi.Struct(
        data=bytes(params_of(plan)),
        pointers=pointers,
        maps={map_offset(name): tensor_map for name, tensor_map in maps.items()},
    )


def image_of(plan: Plan) -> abi.Image:
    """How a block of the kernel of a forward Plan is started: known without compiling it."""
    (launch,) = launches_of(plan)
    return abi.Image(threads=launch.kernel.threads, dynamic_smem_bytes=launch.kernel.smem_bytes)
