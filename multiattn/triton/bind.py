"""What a launch of an emitted forward kernel hands to the driver, by Triton's calling convention. Pure Python.

Arguments in order, without the constants; a pointer is an address; a tensor descriptor is a CUtensorMap by value, its
extents in 32 bit, its strides in 64 bit; after the kernel's own come two pointers to scratch memory, which is not used.
An integer that is 1 is a constant, one that is a multiple of 16 is known to be one, but for the two lengths.
"""

from __future__ import annotations

from collections.abc import Mapping

from multiattn import abi
from multiattn.backend import Plan
from multiattn.problem import LOG2_E, Problem, Strides
from multiattn.triton.configs import ELEMENT_BYTES, TritonConfig, grid_programs
from multiattn.triton.gluon.configs import VARIANT as GLUON
from multiattn.triton.steps import STEPS

OUT_VECTOR = 8
"""As `multiattn.triton.tiles` has it."""

ONE, WHOLE = "the constant 1", " multiple of 16"
SCRATCH = 2
"""Null pointers behind a kernel's own arguments: global and profile scratch."""
_WIDE_FROM = 1 << 31
_UNSPECIALISED = ("seq_q", "seq_kv")


def bind(plan: Plan, image: abi.Image, emitted: Mapping[str, str] | None = None) -> abi.Binding:
    """The Binding of a forward Plan.

    Args:
        plan: for the tensors at hand, with variant and config of the kernel.
        image: of the kernel: what its compiler said.
        emitted: what the kernel's code is specialised on; None while it is being emitted.
    """
    emitted = emitted or {}
    if plan.variant == GLUON:
        from multiattn.triton.gluon.bind import bind as bind_gluon  # which takes much of this module

        return bind_gluon(plan, image, emitted)
    problem, config, step = plan.problem, plan.config, STEPS[plan.variant].step
    assert isinstance(config, TritonConfig)
    constants: dict[str, str] = {}
    abi.exactly(constants, dtype=problem.dtype, head_dim=problem.head_dim, causal=problem.causal)
    abi.exactly(constants, scale_sign=problem.scale_sign)
    alignment = abi.multiple(constants, emitted, "alignment", problem.alignment, problem.alignment)
    row = max(problem.strides_q[2], problem.strides_k[2], problem.strides_v[2], problem.strides_out[2])
    abi.flag(constants, emitted, "wide", row * max(config.tile_m, config.tile_n) >= _WIDE_FROM)
    arguments: list[abi.Argument] = [abi.Pointer(tensor="q")]
    if step.descriptor:
        for name, strides, box in zip(("k", "v"), (problem.strides_k, problem.strides_v), image.boxes, strict=True):
            arguments += describe(problem, name, strides, box)
    else:
        arguments += [abi.Pointer(tensor="k"), abi.Pointer(tensor="v")]
    arguments += [abi.Pointer(tensor="out"), abi.Pointer(tensor="lse")]
    scale = problem.scale_log2 if step.exp2 else problem.scale_log2 / LOG2_E
    arguments.append(abi.Number(kind="f32", value=scale))
    for name, value in _integers(problem, alignment // ELEMENT_BYTES, with_kv=not step.descriptor).items():
        arguments += integer(constants, emitted, name, value, specialised=name not in _UNSPECIALISED)
    arguments += [abi.Pointer(tensor=None)] * SCRATCH
    grid = (grid_programs(problem, config), 1, 1)
    return abi.Binding(arguments=tuple(arguments), grid=grid, image=image, constants=constants)


def describe(problem: Problem, name: str, strides: Strides, box: abi.Box) -> list[abi.Argument]:
    """A tensor descriptor of q or out ``[B, Hq, Sq, D]``, or of k or v ``[B, Hkv, Skv, D]``."""
    heads, seq = (problem.heads_kv, problem.seq_kv) if name in "kv" else (problem.heads_q, problem.seq_q)
    shape = (problem.batch, heads, seq, problem.head_dim)
    in_bytes = tuple(stride * ELEMENT_BYTES for stride in strides)
    return [
        abi.TensorMap(tensor=name, shape=shape, strides=in_bytes, box=box),
        *(abi.Number(kind="i32", value=extent) for extent in shape),
        *(abi.Number(kind="i64", value=stride) for stride in (*strides, 1)),
    ]


def _integers(problem: Problem, vector: int, *, with_kv: bool) -> dict[str, int]:
    """The integers of the kernel that are no constants by themselves, in its order; strides of tensors in units."""
    sizes = {
        "seq_q": problem.seq_q,
        "seq_kv": problem.seq_kv,
        "heads_q": problem.heads_q,
        "group": problem.group,
        "batch_heads": problem.batch * problem.heads_q,
    }
    units = [("q", problem.strides_q, vector)]
    if with_kv:
        units += [("k", problem.strides_k, vector), ("v", problem.strides_v, vector)]
    units.append(("out", problem.strides_out, OUT_VECTOR))
    for name, strides, unit in units:
        for dim, stride in zip(("batch", "head", "row"), strides, strict=True):
            sizes[f"{name}_{dim}"] = stride // unit
    return sizes


def integer(
    constants: dict[str, str], emitted: Mapping[str, str], name: str, value: int, *, specialised: bool
) -> list[abi.Argument]:
    """An integer as the kernel takes it, not at all where it is a constant; `specialised`: if its value may matter."""
    known = abi.settle(constants, emitted, name, _known_of(value, specialised), lambda there: _accepts(there, value))
    if known == ONE:
        return []
    return [abi.Number(kind="i64" if known.startswith("i64") else "i32", value=value)]


def _known_of(value: int, specialised: bool) -> str:
    """What Triton's JIT makes of an integer: its width and, if it may, `ONE` or whether it is a multiple of 16."""
    width = "i32" if abi.INT32_MIN <= value <= abi.INT32_MAX else "i64"
    if not specialised:
        return width
    if value == 1:
        return ONE
    return width + WHOLE if value % 16 == 0 else width


def _accepts(there: str, value: int) -> bool:
    """Whether code that was specialised on `there` takes a value."""
    if there == ONE:
        return value == 1
    if there.startswith("i32") and not abi.INT32_MIN <= value <= abi.INT32_MAX:
        return False
    return not there.endswith(WHOLE) or value % 16 == 0
