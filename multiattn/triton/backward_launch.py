"""From a backward Plan to the arguments of its kernels, and to a launcher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.jit import KernelInterface

from multiattn.backend import BackwardLauncher, Plan, variant_of
from multiattn.problem import Problem
from multiattn.triton import backward, interpreter, tiles
from multiattn.triton.backward_configs import ROWS_BESIDE, BackwardConfig, key_programs, query_programs
from multiattn.triton.configs import ELEMENT_BYTES, TritonConfig, head_pad
from multiattn.triton.launch import INT32, MemoryStub, compiler_options, describe, descriptor_fields, in_units

OUT_VECTOR: int = tiles.OUT_VECTOR.value
_BESIDE_OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCall:
    """One kernel of a launch: what `multiattn.triton.compile` and Triton's JIT ask about it."""

    kernel: KernelInterface[Any]
    grid: int
    options: dict[str, Any]
    arguments: tuple[Any, ...]
    """With stand-ins for the tensors: what the kernel is specialised on."""

    def stubs(self) -> tuple[Any, ...]:
        """All arguments, with stand-ins for the tensors."""
        return self.arguments


class OnePass:
    """The launch of a variant that sums dq up in a workspace: prepare_rows, gradients_of_keys, finish_dq."""

    def __init__(self, plan: Plan) -> None:
        self.problem = plan.problem
        self._keys = _KeysCall(plan, one_pass=True)
        problem = plan.problem
        pad = head_pad(problem.head_dim)
        strides = in_units(problem.strides_out, OUT_VECTOR)
        wide = problem.strides_out[2] * ROWS_BESIDE >= INT32
        heads = (problem.heads_q, problem.batch * problem.heads_q)
        self._rest = (problem.seq_q, *heads, *strides, problem.head_dim, pad, ROWS_BESIDE, wide)
        grid = query_programs(problem, ROWS_BESIDE)
        out, row = MemoryStub(dtype=problem.torch_dtype), MemoryStub(dtype=torch.float32)
        prepared = self._prepare_arguments(out, row, out, None, row, row)
        finished = self._finish_arguments(row, out)
        self.calls = (
            KernelCall(kernel=backward.prepare_rows, grid=grid, options=_BESIDE_OPTIONS, arguments=prepared),
            self._keys.call(),
            KernelCall(kernel=backward.finish_dq, grid=grid, options=_BESIDE_OPTIONS, arguments=finished),
        )

    def arguments(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dlse: Any, dq: Any, dk: Any, dv: Any
    ) -> tuple[tuple[Any, ...], ...]:
        """Every argument of each of `calls`, in order; makes the workspace."""
        delta = lse.new_empty(lse.shape)
        dq_sum = lse.new_empty(q.shape)
        return (
            self._prepare_arguments(out, lse, dout, dlse, delta, dq_sum),
            self._keys.arguments(q, k, v, lse, dout, delta, dq_sum, dk, dv),
            self._finish_arguments(dq_sum, dq),
        )

    def _prepare_arguments(self, out: Any, lse: Any, dout: Any, dlse: Any, delta: Any, dq_sum: Any) -> tuple[Any, ...]:
        dlse, dlse_rows = (lse, 0) if dlse is None else (dlse, self.problem.seq_q)
        return (out, dout, dlse, delta, dq_sum, dlse_rows, *self._rest)

    def _finish_arguments(self, dq_sum: Any, dq: Any) -> tuple[Any, ...]:
        return (dq_sum, dq, self.problem.grad_factor, *self._rest)


class TwoPass:
    """The launch of a variant that walks the keys for dq and the queries for dk and dv; deterministic."""

    def __init__(self, plan: Plan) -> None:
        config = plan.config
        assert isinstance(config, BackwardConfig)
        problem = plan.problem
        self.problem = problem
        self._descriptor: bool = dict(variant_of(plan).flags)["descriptor"]
        self._keys = _KeysCall(plan, one_pass=False)
        self._of_k = descriptor_fields(problem, problem.strides_k, config.of_dq)
        self._of_v = descriptor_fields(problem, problem.strides_v, config.of_dq)
        self._factors = (problem.score_factor, problem.grad_factor)
        self._rest = self._arguments(problem, config.of_dq)
        given = MemoryStub(dtype=problem.torch_dtype, address=problem.alignment)
        out, row = MemoryStub(dtype=problem.torch_dtype), MemoryStub(dtype=torch.float32)
        self.calls = (
            KernelCall(
                kernel=backward.gradient_of_queries,
                grid=query_programs(problem, config.of_dq.tile_m),
                options=compiler_options(config.of_dq),
                arguments=self._queries_arguments(given, given, given, out, row, out, None, out, row),
            ),
            self._keys.call(),
        )

    def arguments(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dlse: Any, dq: Any, dk: Any, dv: Any
    ) -> tuple[tuple[Any, ...], ...]:
        """Every argument of each of `calls`, in order; makes the workspace."""
        delta = lse.new_empty(lse.shape)
        return (
            self._queries_arguments(q, k, v, out, lse, dout, dlse, dq, delta),
            self._keys.arguments(q, k, v, lse, dout, delta, None, dk, dv),
        )

    def _queries_arguments(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dlse: Any, dq: Any, delta: Any
    ) -> tuple[Any, ...]:
        if self._descriptor:
            k, v = describe(k, self._of_k), describe(v, self._of_v)
        dlse, dlse_rows = (lse, 0) if dlse is None else (dlse, self.problem.seq_q)
        return (q, k, v, out, lse, dout, dlse, dq, delta, *self._factors, dlse_rows, *self._rest)

    def _arguments(self, problem: Problem, config: TritonConfig) -> tuple[Any, ...]:
        vector = problem.alignment // ELEMENT_BYTES
        strides_kv: tuple[int | None, ...] = (None,) * 6  # the descriptors have them
        if not self._descriptor:
            strides_kv = in_units((*problem.strides_k, *problem.strides_v), vector)
        return (
            problem.seq_q,
            problem.seq_kv,
            problem.heads_q,
            problem.group,
            problem.batch * problem.heads_q,
            *in_units(problem.strides_q, vector),
            *strides_kv,
            *in_units(problem.strides_out, OUT_VECTOR),
            problem.causal,
            self._descriptor,
            problem.head_dim,
            head_pad(problem.head_dim),
            config.tile_m,
            config.tile_n,
            config.num_stages,
            config.heads_together,
            vector,
            _wide(problem, config),
        )


class _KeysCall:
    """What a Plan asks of `backward.gradients_of_keys`."""

    def __init__(self, plan: Plan, *, one_pass: bool) -> None:
        config = plan.config
        assert isinstance(config, BackwardConfig)
        self._problem = problem = plan.problem
        self._config = config
        self._one_pass = one_pass
        self._descriptor: bool = dict(variant_of(plan).flags)["descriptor"]
        contiguous = (problem.heads_q * problem.seq_q * problem.head_dim, problem.seq_q * problem.head_dim)
        fields = [
            descriptor_fields(problem, strides, config, of_queries=True)
            for strides in (problem.strides_q, problem.strides_out, (*contiguous, problem.head_dim))
        ]
        self._of_q, self._of_dout, self._of_sum = fields
        self._rest = self._arguments()

    def call(self) -> KernelCall:
        problem = self._problem
        given = MemoryStub(dtype=problem.torch_dtype, address=problem.alignment)
        out, row = MemoryStub(dtype=problem.torch_dtype), MemoryStub(dtype=torch.float32)
        return KernelCall(
            kernel=backward.gradients_of_keys,
            grid=key_programs(problem, self._config),
            options=compiler_options(self._config),
            arguments=self.arguments(given, given, given, row, out, row, row if self._one_pass else None, out, out),
        )

    def arguments(
        self, q: Any, k: Any, v: Any, lse: Any, dout: Any, delta: Any, dq_sum: Any, dk: Any, dv: Any
    ) -> tuple[Any, ...]:
        """Every argument of the kernel, in order."""
        if self._descriptor:
            q, dout = describe(q, self._of_q), describe(dout, self._of_dout)
            if self._one_pass:
                dq_sum = describe(dq_sum, self._of_sum)
        return (q, k, v, lse, dout, delta, dq_sum, dk, dv, *self._rest)

    def _arguments(self) -> tuple[Any, ...]:
        problem, config = self._problem, self._config
        vector = problem.alignment // ELEMENT_BYTES
        strides_q: tuple[int | None, ...] = (None,) * 3  # the descriptors have them
        strides_dout = strides_q
        if not self._descriptor:
            strides_q = in_units(problem.strides_q, vector)
            strides_dout = in_units(problem.strides_out, OUT_VECTOR)
        return (
            problem.score_factor,
            problem.grad_factor,
            problem.seq_q,
            problem.seq_kv,
            problem.heads_q,
            problem.group,
            problem.batch * problem.heads_kv,
            *strides_q,
            *in_units((*problem.strides_k, *problem.strides_v), vector),
            *strides_dout,
            *in_units((*problem.strides_dk, *problem.strides_dv), OUT_VECTOR),
            self._one_pass,
            problem.causal,
            self._descriptor,
            problem.head_dim,
            head_pad(problem.head_dim),
            config.tile_m,
            config.tile_n,
            config.num_stages,
            config.heads_together,
            vector,
            _wide(problem, config),
        )


def _wide(problem: Problem, config: TritonConfig) -> bool:
    """Whether offsets inside one tile can pass 2^31 elements."""
    given = (problem.strides_q, problem.strides_k, problem.strides_v)
    dense = (problem.strides_out, problem.strides_dk, problem.strides_dv)
    return max(strides[2] for strides in (*given, *dense)) * max(config.tile_m, config.tile_n) >= INT32


def launch_of(plan: Plan) -> OnePass | TwoPass:
    """The kernels of a backward Plan, and how their arguments are made."""
    return OnePass(plan) if dict(variant_of(plan).flags)["one_pass"] else TwoPass(plan)


def prepare(plan: Plan) -> BackwardLauncher:
    """The launcher of a Plan: compiled for the current device, or interpreted when the Plan is for the CPU."""
    launch = launch_of(plan)
    if not plan.arch.is_gpu:
        return _Interpreted(launch)
    return _Compiled(launch)


class _Interpreted:
    def __init__(self, launch: OnePass | TwoPass) -> None:
        self._launch = launch

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
    ) -> None:
        arguments_of_all = self._launch.arguments(q, k, v, out, lse, dout, dlse, dq, dk, dv)
        for call, arguments in zip(self._launch.calls, arguments_of_all, strict=True):
            interpreter.run(call.kernel, call.grid, *arguments)


class _Compiled:
    """Launches compiled kernels past the JIT's own argument handling, as forward's launcher does."""

    def __init__(self, launch: OnePass | TwoPass) -> None:
        self._arguments = launch.arguments
        self._device = torch.cuda.current_device()
        with interpreter.exclusive_language:
            self._runs = tuple(_compiled(call) for call in launch.calls)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
    ) -> None:
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        arguments_of_all = self._arguments(q, k, v, out, lse, dout, dlse, dq, dk, dv)
        for run, arguments in zip(self._runs, arguments_of_all, strict=True):
            run(*arguments, stream=stream)


def _compiled(call: KernelCall) -> Any:
    kernel: Any = call.kernel
    return kernel.warmup(*call.stubs(), grid=(call.grid,), **call.options)[(call.grid, 1, 1)]
