"""From a Plan to the arguments of the kernel, and to a launcher: compiled on a GPU, interpreted on CPU tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from multiattn import abi
from multiattn.backend import Launcher, Plan
from multiattn.driver_launch import DriverLauncher, Lender
from multiattn.problem import LOG2_E, VECTOR_BYTES, Problem, Strides
from multiattn.triton import forward, interpreter, signature
from multiattn.triton.configs import ELEMENT_BYTES, TritonConfig, grid_programs, head_pad
from multiattn.triton.steps import STEPS
from multiattn.triton.tiles import OUT_VECTOR

INT32 = 1 << 31
"""Offsets from here on need 64 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryStub:
    """Stands for memory where only its type and address are asked, or how aligned that is: while compiling."""

    dtype: torch.dtype
    address: int = VECTOR_BYTES

    def data_ptr(self) -> int:
        """Its address, or one that is as aligned."""
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

    def specialised_on(self, constants: Mapping[str, str]) -> tuple[set[str], dict[str, Any]]:
        """What a Binding's constants tell of the kernel: pointers to multiples of 16 bytes, and values by name."""
        alignment = abi.divisor(constants["alignment"])
        aligned = {"q"} if self.step.descriptor else {"q", "k", "v"}
        values = {
            "CAUSAL": constants["causal"] == "True",
            "SCALE_SIGN": int(constants["scale_sign"]),
            "HEAD_DIM": int(constants["head_dim"]),
            "VECTOR": alignment // self.problem.torch_dtype.itemsize,
            "WIDE": constants["wide"] == "True",
        }
        return {"out", "lse"} | (aligned if alignment == VECTOR_BYTES else set()), values

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
    with interpreter.exclusive_language:
        kernel = call.kernel.warmup(*call.stubs(), grid=(call.grid,), **call.options)
    return launcher_of(kernel, call.grid, call.arguments)


class _Interpreted:
    def __init__(self, call: Call) -> None:
        self._call = call

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        interpreter.run(self._call.kernel, self._call.grid, *self._call.arguments(q, k, v, out, lse))


# ---------------------------------------------------------------- compiled kernels


def launcher_of(
    kernel: Any, blocks: int, arguments: Callable[..., tuple[Any, ...]], lenders: Mapping[str, Lender] | None = None
) -> Launcher:
    """The launcher of a CompiledKernel on the current device: by the driver itself, or by Triton's own code.

    Both launch the same code with the same arguments. The first costs the host half as much, or less. Triton's own is
    for a kernel that needs more than arguments (`signature.why_not`), for one that takes more shared memory than usual
    (`USUAL_SMEM_BYTES`), while somebody listens to Triton's launches (`knobs.runtime.launch_enter_hook`, as its
    profiler does), and for a release of Triton that compiles to another signature than is known here, of which a
    RuntimeWarning tells, once.

    Args:
        kernel: the CompiledKernel.
        blocks: of its grid.
        arguments: every argument of the kernel's function, of q, k, v, out, lse and what `lenders` lend.
        lenders: of memory that every launch brings beside the tensors, by name, in the order of `arguments`.
    """
    lenders = lenders or {}
    run = kernel[(blocks, 1, 1)]  # this loads it
    return _by_driver(kernel, blocks, arguments, lenders) or _ThroughTriton(run, arguments, lenders)


USUAL_SMEM_BYTES = 228 * 1024
"""Of a block: for more Triton 3.9 asks the driver for another mode of shared memory."""

_warned: set[str] = set()


def _by_driver(
    kernel: Any, blocks: int, arguments: Callable[..., tuple[Any, ...]], lenders: Mapping[str, Lender]
) -> DriverLauncher | None:
    """The launcher past Triton's, or None. What is handed over is what Triton's signature and the cubin say."""
    stubs = {name: object() for name in (*abi.TENSORS, *lenders)}
    names = {id(stub): name for name, stub in stubs.items()}
    try:
        metadata = kernel.metadata
        if signature.why_not(metadata, overlap=True) or metadata.shared > USUAL_SMEM_BYTES or _is_watched():
            return None
        binding = abi.Binding(
            arguments=signature.arguments_of(kernel, arguments(*stubs.values()), names),
            grid=(blocks, 1, 1),
            image=signature.image_of(metadata),
            constants={},
        )
        abi.check(binding, abi.read_entry(kernel.asm["cubin"], metadata.name))
        function, overlaps = int(kernel.function), bool(metadata.launch_pdl)
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError) as error:  # private to Triton, all of it
        if triton.__version__ not in _warned:
            _warned.add(triton.__version__)
            warnings.warn(
                f"Triton {triton.__version__} compiles kernels to a signature that multiattn does not know "
                f"({type(error).__name__}: {error}); Triton's own launcher is used, which costs the host more",
                RuntimeWarning,
                stacklevel=2,
            )
        return None
    device = torch.cuda.current_device()
    return DriverLauncher(function, binding, device, overlaps=overlaps, lenders=lenders, keeps=kernel)


def _is_watched() -> bool:
    """Whether somebody listens to Triton's launches."""
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return any(getattr(hook, "calls", hook) for hook in hooks)  # a chain of hooks, or one, or None


class _ThroughTriton:
    """Launches a compiled kernel by Triton, but past its JIT, which looks for arguments that ask for other code.

    All that it looks at is fixed by the Problem, and out and lse are aligned. The stream is named, not left to Triton
    to ask the driver for.
    """

    def __init__(self, run: Any, arguments: Callable[..., tuple[Any, ...]], lenders: Mapping[str, Lender]) -> None:
        self._run, self._arguments = run, arguments
        self._lenders = tuple(lenders.values())
        self._device = torch.cuda.current_device()

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        # What torch.cuda.current_stream(device).cuda_stream is, without a Stream object for each launch.
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        held = [lend(stream) for lend in self._lenders]
        lent = (MemoryStub(dtype=torch.int32, address=address) for address, _ in held)
        self._run(*self._arguments(q, k, v, out, lse, *lent), stream=stream)


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
