"""From a Plan to the arguments of the Gluon kernel, and to a launcher."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from multiattn import abi
from multiattn.backend import Launcher, Plan
from multiattn.counters import counter_lender
from multiattn.problem import Strides
from multiattn.schedule import heads_side_by_side, most_multiprocessors
from multiattn.triton import interpreter
from multiattn.triton.gluon import forward
from multiattn.triton.gluon.configs import GluonConfig, grid_blocks, pieces_of, query_tiles
from multiattn.triton.gluon.shape import Shape
from multiattn.triton.launch import MemoryStub, launcher_of

_DTYPES = {"fp16": gl.float16, "bf16": gl.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """A tensor descriptor's block, and its layout in shared memory: ``rows`` of one head, `columns` of head_dim."""

    rows: int
    columns: int
    dtype: str

    def describe(self, tensor: Any, shape: list[int], strides: Strides) -> TensorDescriptor:
        """A TensorDescriptor without its constructor, whose checks are done: they are the variant's capability."""
        block = [1, 1, self.rows, self.columns]
        descriptor = TensorDescriptor.__new__(TensorDescriptor)
        descriptor.__dict__.update(
            base=tensor,
            shape=shape,
            strides=[*strides, 1],
            block_shape=block,
            layout=gl.NVMMASharedLayout.get_default_for(block, _DTYPES[self.dtype]),
            padding="zero",
            round_f32_to_tf32=False,
        )
        return descriptor


def shape_of(plan: Plan) -> Shape:
    """The kernel's constants."""
    problem, config = plan.problem, plan.config
    assert isinstance(config, GluonConfig)
    wide, narrow = pieces_of(problem.head_dim)
    return Shape(
        causal=problem.causal,
        ragged=problem.seq_kv % config.tile_n != 0,
        scale_sign=problem.scale_sign,
        head_dim=problem.head_dim,
        wide=wide,
        narrow=narrow,
        tile_n=config.tile_n,
        warpgroups=config.warpgroups,
        stages=config.stages,
        q_slots=config.q_slots,
        is_persistent=config.scheduler != "one_tile",
        is_dynamic=config.scheduler == "dynamic",
        pingpong=config.pingpong,
        lazy_max=config.lazy_max,
        exp2_fma_sixteenths=config.exp2_fma_sixteenths,
    )


class GluonCall:
    """What one Plan asks of the kernel: the grid, the compiler's options, and the arguments beside the tensors."""

    def __init__(self, plan: Plan) -> None:
        config = plan.config
        assert isinstance(config, GluonConfig)
        self.problem = problem = plan.problem
        self.kernel: Any = forward.attention_forward
        # Four warps are the first consumer's; the compiler adds those of the other partitions.
        self.options = {"num_warps": 4, "maxnreg": config.registers, "launch_pdl": True, "enable_fp_fusion": True}
        self.shape = shape_of(plan)
        self._tiles = grid_blocks(config, problem)
        self.grid = self.blocks(most_multiprocessors(plan.arch))
        self._query_tiles = query_tiles(config, problem)

    def blocks(self, multiprocessors: int) -> int:
        """Of a launch on a device of so many SMs."""
        return min(self._tiles, multiprocessors) if self.shape.is_persistent else self._tiles

    def specialised_on(self, constants: Mapping[str, str]) -> tuple[set[str], dict[str, Any]]:
        """What a Binding's constants tell of the kernel: pointers to multiples of 16 bytes, and values by name."""
        shape = replace(
            self.shape,
            causal=constants["causal"] == "True",
            ragged=constants["ragged"] == "True",
            scale_sign=int(constants["scale_sign"]),
            head_dim=int(constants["head_dim"]),
        )
        return {"lse"} | ({"counter"} if self.shape.is_dynamic else set()), {"C": shape}

    def arguments(self, q: Any, k: Any, v: Any, out: Any, lse: Any, workspace: Any = None) -> tuple[Any, ...]:
        """Every argument of `forward.attention_forward`, in order; `workspace` is the counter."""
        problem = self.problem
        return (
            *self._maps(self.shape.wide, q, k, v, out),
            *self._maps(self.shape.narrow, q, k, v, out),
            lse,
            workspace,
            problem.scale_log2,
            problem.seq_q,
            problem.seq_kv,
            problem.heads_q,
            problem.group,
            self._query_tiles,
            problem.batch * problem.heads_q,
            heads_side_by_side(problem),
            self.shape,
        )

    def stubs(self) -> tuple[Any, ...]:
        """The same arguments with stand-ins for the tensors: what the kernel is specialised on."""
        given = MemoryStub(dtype=self.problem.torch_dtype)
        counter = MemoryStub(dtype=torch.int32) if self.shape.is_dynamic else None
        return self.arguments(given, given, given, given, MemoryStub(dtype=torch.float32), counter)

    def _maps(self, columns: int, q: Any, k: Any, v: Any, out: Any) -> tuple[TensorDescriptor | None, ...]:
        if columns == 0:
            return (None,) * 4
        problem = self.problem
        queries = [problem.batch, problem.heads_q, problem.seq_q, problem.head_dim]
        keys = [problem.batch, problem.heads_kv, problem.seq_kv, problem.head_dim]
        of_rows = _Block(rows=64, columns=columns, dtype=problem.dtype)
        of_keys = _Block(rows=self.shape.tile_n, columns=columns, dtype=problem.dtype)
        return (
            of_rows.describe(q, queries, problem.strides_q),
            of_keys.describe(k, keys, problem.strides_k),
            of_keys.describe(v, keys, problem.strides_v),
            of_rows.describe(out, queries, problem.strides_out),
        )


def prepare(plan: Plan) -> Launcher:
    """The launcher of a Plan, compiled for the current device."""
    call, device = GluonCall(plan), torch.cuda.current_device()
    blocks = call.blocks(torch.cuda.get_device_properties(device).multi_processor_count)
    with interpreter.exclusive_language:
        kernel = call.kernel.warmup(*call.stubs(), grid=(blocks,), **call.options)
    lenders = {}
    if plan.workspace_bytes:
        lenders[abi.WORKSPACE] = counter_lender(device, plan.workspace_bytes)
    return launcher_of(kernel, blocks, call.arguments, lenders)
