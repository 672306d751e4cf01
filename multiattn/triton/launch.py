"""From a Plan to the arguments of the kernel, and to a launcher: compiled on a GPU, interpreted on CPU tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from multiattn.backend import Launcher, Plan
from multiattn.problem import LOG2_E, VECTOR_BYTES, Problem, Strides
from multiattn.triton import forward, interpreter
from multiattn.triton.configs import ELEMENT_BYTES, TritonConfig, grid_programs, head_pad
from multiattn.triton.steps import STEPS
from multiattn.triton.tiles import OUT_VECTOR

INT32 = 1 << 31
"""Offsets from here on need 64 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryStub:
    """Stands for a tensor where only its type and alignment are asked: while compiling."""

    dtype: torch.dtype
    address: int = VECTOR_BYTES

    def data_ptr(self) -> int:
        """An address that is as aligned as the tensor's."""
        return self.address


class Call:
    """What one Plan asks of the kernel: the grid, the compiler's options, and the arguments beside the tensors."""

    def __init__(self, plan: Plan) -> None:
        config = plan.config
        assert isinstance(config, TritonConfig)
        problem = plan.problem
        self.problem = problem
        self.step = STEPS[plan.variant].step
        self.grid = grid_programs(problem, config)
        self.kernel = forward.attention_forward
        self.options = compiler_options(config)
        self._of_k = descriptor_fields(problem, problem.strides_k, config)
        self._of_v = descriptor_fields(problem, problem.strides_v, config)
        self._rest = self._arguments(config)

    def arguments(self, q: Any, k: Any, v: Any, out: Any, lse: Any) -> tuple[Any, ...]:
        """Every argument of `forward.attention_forward`, in order."""
        if self.step.descriptor:
            k, v = describe(k, self._of_k), describe(v, self._of_v)
        return (q, k, v, out, lse, *self._rest)

    def stubs(self) -> tuple[Any, ...]:
        """The same arguments with stand-ins for the tensors: what the kernel is specialised on."""
        dtype = self.problem.torch_dtype
        given = MemoryStub(dtype=dtype, address=self.problem.alignment)
        return self.arguments(given, given, given, MemoryStub(dtype=dtype), MemoryStub(dtype=torch.float32))

    def _arguments(self, config: TritonConfig) -> tuple[Any, ...]:
        problem = self.problem
        vector = problem.alignment // ELEMENT_BYTES
        strides_kv: tuple[int | None, ...] = (None,) * 6  # the descriptors have them
        if not self.step.descriptor:
            strides_kv = in_units((*problem.strides_k, *problem.strides_v), vector)
        row = max(problem.strides_q[2], problem.strides_k[2], problem.strides_v[2], problem.strides_out[2])
        return (
            problem.scale_log2 if self.step.exp2 else problem.scale_log2 / LOG2_E,
            problem.seq_q,
            problem.seq_kv,
            problem.heads_q,
            problem.group,
            problem.batch * problem.heads_q,
            *in_units(problem.strides_q, vector),
            *strides_kv,
            *in_units(problem.strides_out, OUT_VECTOR.value),
            problem.causal,
            problem.scale_sign,
            self.step,
            problem.head_dim,
            head_pad(problem.head_dim),
            config.tile_m,
            config.tile_n,
            config.num_stages,
            config.heads_together,
            vector,
            row * max(config.tile_m, config.tile_n) >= INT32,
        )


def compiler_options(config: TritonConfig) -> dict[str, Any]:
    """What Triton's compiler is told beside the constexprs."""
    # Without fusion a score costs a multiply and an add; the default of this option changes in Triton 3.10.
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True}
    if config.registers is not None:
        options["maxnreg"] = config.registers
    return options


def prepare(plan: Plan) -> Launcher:
    """The launcher of a Plan: compiled for the current device, or interpreted when the Plan is for the CPU."""
    call = Call(plan)
    if not plan.arch.is_gpu:
        return _Interpreted(call)
    return _Compiled(call)


class _Interpreted:
    def __init__(self, call: Call) -> None:
        self._call = call

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        interpreter.run(self._call.kernel, self._call.grid, *self._call.arguments(q, k, v, out, lse))


class _Compiled:
    """Launches a compiled kernel past the JIT's own argument handling, which costs more than all else on the host.

    That handling exists to notice arguments whose alignment or value asks for another specialisation. All of them are
    fixed by the Problem, and out and lse are aligned. The stream is named, not left to Triton to ask the driver for.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._device = torch.cuda.current_device()
        with interpreter.exclusive_language:
            kernel = call.kernel.warmup(*call.stubs(), grid=(call.grid,), **call.options)
            self._run = kernel[(call.grid, 1, 1)]

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        # What torch.cuda.current_stream(device).cuda_stream is, without a Stream object for each launch.
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        self._run(*self._call.arguments(q, k, v, out, lse), stream=stream)


def in_units(strides: tuple[int, ...], unit: int) -> tuple[int, ...]:
    """Strides in units of `unit` elements, which divides them all."""
    assert all(stride % unit == 0 for stride in strides)
    return tuple(stride // unit for stride in strides)


def descriptor_fields(
    problem: Problem, strides: Strides, config: TritonConfig, *, of_queries: bool = False
) -> dict[str, Any]:
    """The fields of the TensorDescriptor of a tensor shaped like k, or like q, but for the tensor itself."""
    heads, seq, tile = problem.heads_kv, problem.seq_kv, config.tile_n
    if of_queries:
        heads, seq, tile = problem.heads_q, problem.seq_q, config.tile_m
    return {
        "shape": [problem.batch, heads, seq, problem.head_dim],
        "strides": [*strides, 1],
        "block_shape": [1, 1, tile, head_pad(problem.head_dim)],
        "padding": "zero",
        "round_f32_to_tf32": False,
    }


def describe(tensor: Any, fields: dict[str, Any]) -> TensorDescriptor:
    """A TensorDescriptor without its constructor, whose checks are done (they are the variant's capability)."""
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.__dict__.update(fields, base=tensor)
    return descriptor
