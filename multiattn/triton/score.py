"""Score programs as functions of Triton and Gluon: a table of operations, loads through pointers, sums of gradients.

`aux` is a tuple of `LoweredScore.fields`, `daux` one of `LoweredScore.gradient_fields`: numbers, and pointers with
their strides in elements.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from multiattn.plan.arch import Arch
from multiattn.problem import Problem
from multiattn.run.generated import module_of
from multiattn.score.expression import Node, inputs_of, walk
from multiattn.score.lower import LoadSlope, LoweredScore, is_zero, lower
from multiattn.score.printing import INFIX, Language, calls
from multiattn.score.python import PythonDialect
from multiattn.triton.staged import DISTANCES, stages_of

_TANH = '"tanh.approx.f32 $0, $1;", "=f,f", [{0}], dtype=tl.float32, is_pure=True, pack=1'
_MUL_RN = '"mul.rn.f32 $0, $1, $2;", "=f,f,f", [{0}, {1}], dtype=tl.float32, is_pure=True, pack=1'
_NAN = "propagate_nan=triton.language.PropagateNan.ALL"


def _literal(constant: Node) -> str:
    value = constant.value
    return repr(value) if math.isfinite(value) else f'float("{value}")'


def _offset(pointer: str, strides: Mapping[str, str], load: Node, prefix: str, indices: Sequence[str]) -> str:
    """The address of an element, in 64 bits: whole tiles come last, so that little is computed for each element."""
    parts = [pointer]
    for axis, (node, index) in enumerate(zip(load.args, indices, strict=True)):
        if not is_zero(node):
            parts.append(f"tl.cast({index}, tl.int64) * {strides[f'{prefix}{load.value}_stride{axis}']}")
    return " + ".join(parts)


def _load(load: Node, indices: Sequence[str], names: Mapping[str, str]) -> str:
    address = _offset(names[f"tensor{load.value}"], names, load, "tensor", indices)
    return f"tl.load({address}).to({LANGUAGE.types[load.dtype]})"


def _load_on_gpu(load: Node, indices: Sequence[str], names: Mapping[str, str]) -> str:
    text = _load(load, indices, names)
    return text.replace("tl.load", "load_in_place", 1) if {"q", "kv"} <= inputs_of(load) else text


LANGUAGE = Language(
    types=MappingProxyType({"f32": "tl.float32", "i32": "tl.int32", "i64": "tl.int64", "bool": "tl.int1"}),
    ops=MappingProxyType(
        {
            **INFIX,
            **calls("abs exp2 log2 sqrt sqrt_rn sin cos floor", "tl."),
            **{f"{op}:f32": f"tl.{op}imum({{0}}, {{1}}, {_NAN})" for op in ("min", "max")},
            **{op: f"tl.{op}imum({{0}}, {{1}})" for op in ("min", "max")},
            "div_rn": "tl.div_rn({0}, {1})",
            "mul_rn": "({0} * {1})",
            "fmod": "({0} % {1})",  # of what has no sign
            "neg": "(-{0})",
            "not": "(~{0})",
            "quotient": "({0} // {1})",
            "remainder": "({0} % {1})",
            "where": "tl.where({0}, {1}, {2})",
            "tanh": f"tl.inline_asm_elementwise({_TANH})",
        }
    ),
    cast="tl.cast({0}, {1})",
    literal=_literal,
    load=_load,
)
_TRITON = PythonDialect(
    language=LANGUAGE,
    header="import triton\nimport triton.language as tl\n",
    decorator="@triton.jit",
    constant="tl.constexpr",
)
_ON_GPU: Mapping[str, str] = MappingProxyType(
    {
        **LANGUAGE.ops,
        "mul_rn": f"tl.inline_asm_elementwise({_MUL_RN})",  # or it is fused into a sum
        "fmod": "fmod({0}, {1})",  # Triton's own `%` is right for quotients below 2^24
    }
)
_FMOD = "from triton.language.extra.libdevice import fmod\n"
_COMPILED = replace(
    _TRITON,
    language=LANGUAGE._replace(load=_load_on_gpu, ops=_ON_GPU),
    header=f"{_TRITON.header}\nfrom multiattn.triton.kernels.elements import load_in_place\n",
)
"""Not for the interpreter."""
_IN_PLACE = replace(
    _COMPILED,
    language=LANGUAGE._replace(load=lambda *it: _load(*it).replace("tl.load", "load_in_place", 1), ops=_ON_GPU),
)
"""For walks over listed blocks. Where Triton chooses the threads of a load of a value for each key, it may move all
that is computed of scores to them, too."""
_GLUON = PythonDialect(
    language=LANGUAGE._replace(
        ops=MappingProxyType(
            {**_ON_GPU, "distance": "distance({0}, {1})", "scaled_distance": "scaled_distance({0}, {1}, {2})"}
        ),
    ),
    header="import triton.language\nfrom triton.experimental import gluon\n"
    "from triton.experimental.gluon import language as tl\n\n"
    f"from multiattn.triton.kernels.gluon.scores import {', '.join(DISTANCES)}\n",
    decorator="@gluon.jit",
    constant="tl.constexpr",
)


class ScoreFunctions(NamedTuple):
    """The jitted functions of a program, None for those that it has not; a constexpr of kernels as it is.

    Their names hold a digest of all their text, by which Triton's cache tells them apart.
    """

    score: Any = None
    mask: Any = None
    tail: Any = None
    score_and_slope: Any = None
    load_gradients: Any = None
    once: Any = None
    """With `ahead` and `rest` the score once more, in `Stages`: of Gluon alone."""
    ahead: Any = None
    rest: Any = None


def text_of(
    lowered: LoweredScore, slots: Sequence[int] = (), *, gluon: bool = False, listed: bool = False
) -> tuple[str, str]:
    """Digest and text of the module; see `PythonDialect.module`."""
    names = {it.name: f"aux[{place}]" for place, it in enumerate(lowered.fields)}
    gradients = {it.name: f"daux[{place}]" for place, it in enumerate(lowered.gradient_fields(slots))}

    def add(it: LoadSlope, value: str, indices: Sequence[str]) -> Iterator[str]:
        load = it.load
        pointer = _offset(gradients[f"grad{load.value}"], gradients, load, "grad", indices)
        if it.is_exclusive:
            yield f"tl.store({pointer}, {value}, mask=inside)"
        elif not it.summed:
            yield f'tl.atomic_add({pointer}, {value}, mask=live, sem="relaxed")'
        else:
            both = len(it.summed) == 2
            axis = "q_axis" if it.summed == ("q",) else "1 - q_axis"
            total = f"tl.sum(tl.sum({value}, 1), 0)" if both else f"tl.sum({value}, {axis}, keep_dims=True)"
            yield f'tl.atomic_add({pointer}, {total}, sem="relaxed")'

    values: tuple[tuple[str, tuple[Node, ...]], ...] = ()
    if gluon and lowered.score is not None:
        stages = stages_of(lowered.score)
        names |= {name: f"aux[{place}]" for place, name in enumerate(stages.kept, len(names))}
        values = stages.functions
    compiled = _IN_PLACE if listed else _COMPILED
    dialect = _GLUON if gluon else compiled if lowered.approximate else _TRITON
    if any(it.op == "fmod" for _, roots in lowered.functions for it in walk(*roots)) and dialect is not _TRITON:
        dialect = replace(dialect, header=dialect.header + _FMOD)
    return dialect.module(lowered, names, slots, add, values)


def lowered_score(problem: Problem, arch: Arch, *, with_gradients: bool = False) -> LoweredScore | None:
    """The program of a problem as kernels for `arch` compute it: on a GPU with its own tanh.

    `with_gradients`: for a kernel that adds up those of captured tensors.
    """
    if problem.score is None:
        return None
    apart = with_gradients and problem.score.scores is not None
    return lower(problem.score.program, approximate=arch.is_gpu, apart=apart)


def lowered_of_pairs(problem: Problem, arch: Arch) -> LoweredScore | None:
    """`lowered_score`, but none of a packed batch without sequences: there nothing is read, also not by sequence."""
    has_pairs = problem.packing is None or problem.packing.sequences > 0
    return lowered_score(problem, arch) if has_pairs else None


@functools.lru_cache(maxsize=256)
def functions_of(
    lowered: LoweredScore, slots: tuple[int, ...] = (), *, gluon: bool = False, listed: bool = False
) -> ScoreFunctions:
    """The functions of a program; with `slots` also that of the gradients of these captured tensors.

    `listed`: for walks over the blocks that a block mask lists.
    """
    digest, text = text_of(lowered, slots, gluon=gluon, listed=listed)
    module = module_of(f"score_{'gluon' if gluon else 'triton'}_{digest}", text)
    return ScoreFunctions(*(getattr(module, f"{name}_{digest}", None) for name in ScoreFunctions._fields))
