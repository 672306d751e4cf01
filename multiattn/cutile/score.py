"""Score programs as functions of cuTile: a table of operations, loads by ``ct.gather``, sums of gradients.

`aux` is a tuple of the derived scalars and then the captured tensors of `LoweredScore.fields`, those without a
dimension as ``[1]``: strides and sizes are the arrays' own. `daux` is a tuple of fp32 arrays, by the order of slots.
cuTile takes no function as an argument: a kernel has these as variables of the closure that it is made in.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from multiattn.run.generated import module_of
from multiattn.score.expression import ONE, Node
from multiattn.score.lower import LoadSlope, LoweredScore
from multiattn.score.printing import INFIX, Language, calls
from multiattn.score.python import PythonDialect

_APPROX = "rounding_mode=ct.RoundingMode.APPROX"


def _literal(constant: Node) -> str:
    value = constant.value
    if math.isfinite(value):
        return repr(value)
    return "math.nan" if math.isnan(value) else "math.inf" if value > 0 else "(-math.inf)"


def _index(indices: Sequence[str]) -> str:
    return f"({', '.join(indices or '0')},)"


def _load(load: Node, indices: Sequence[str], names: Mapping[str, str]) -> str:
    element = f"ct.gather({names[f'tensor{load.value}']}, {_index(indices)}, check_bounds=False)"
    return f"ct.astype({element}, {LANGUAGE.types[load.dtype]})"


LANGUAGE = Language(
    types=MappingProxyType({"f32": "ct.float32", "i32": "ct.int32", "i64": "ct.int64", "bool": "ct.bool_"}),
    ops=MappingProxyType(
        {
            **INFIX,
            **calls("abs log2 sqrt sqrt_rn:sqrt sin cos floor", "ct."),
            **{f"{op}:f32": f"ct.{op}imum({{0}}, {{1}}, propagate_nan=True)" for op in ("min", "max")},
            **{op: f"ct.{op}imum({{0}}, {{1}})" for op in ("min", "max")},
            "exp2": "ct.exp2({0}, flush_to_zero=True)",
            "div": f"ct.truediv({{0}}, {{1}}, {_APPROX}, flush_to_zero=True)",  # `/` is IEEE's, with a slow path
            "div_rn": "({0} / {1})",
            "mul_rn": "ct.bitcast(ct.bitcast(ct.mul({0}, {1}), ct.int32), ct.float32)",  # or it is fused into a sum
            "fmod": "({0} % {1})",  # of what has no sign
            "neg": "(-{0})",
            "not": "(~{0})",
            "quotient": "({0} // {1})",
            "remainder": "({0} % {1})",
            "where": "ct.where({0}, {1}, {2})",
            "tanh": f"ct.tanh({{0}}, {_APPROX})",
        }
    ),
    cast="ct.astype({0}, {1})",
    literal=_literal,
    load=_load,
)
_CUTILE = PythonDialect(
    language=LANGUAGE,
    header="import math\n\nimport cuda.tile as ct\n",
    decorator="@ct.function",
    constant="ct.Constant[int]",
)


@dataclass(frozen=True, kw_only=True)
class TileScoreFunctions:
    """The functions of a program, None for those that it has not. Kernels read fields of a dataclass as constants."""

    score: Any = None
    mask: Any = None
    tail: Any = None
    score_and_slope: Any = None
    load_gradients: Any = None
    is_additive: bool = False
    """The slope of every score is 1."""


_FUNCTIONS = ("score", "mask", "tail", "score_and_slope", "load_gradients")


def text_of(lowered: LoweredScore, slots: Sequence[int] = ()) -> tuple[str, str]:
    """Digest and text of the module; see `PythonDialect.module`."""
    taken = [it for it in lowered.fields if it.kind in ("f32", "pointer")]
    names = {it.name: f"aux[{place}]" for place, it in enumerate(taken)}
    sizes = [it for it in lowered.fields if it.kind == "size"]
    names |= {it.name: f"{names[f'tensor{it.slot}']}.shape[{it.axis}]" for it in sizes}
    arrays = sorted({it.load.value for it in lowered.gradients_of(slots)})

    def add(it: LoadSlope, value: str, indices: Sequence[str]) -> Iterator[str]:
        where = f"daux[{arrays.index(it.load.value)}], {_index(indices)}"
        if it.is_exclusive:
            yield f"ct.scatter({where}, {value}, mask=inside, check_bounds=False)"
            return
        if it.summed:
            axis = "q_axis" if it.summed == ("q",) else "1 - q_axis"
            value = f"ct.sum({value})" if len(it.summed) == 2 else f"ct.sum({value}, axis={axis}, keepdims=True)"
        yield f"ct.atomic_add({where}, {value}, check_bounds=False, memory_order=ct.MemoryOrder.RELAXED)"

    return _CUTILE.module(lowered, names, slots, add)


@functools.lru_cache(maxsize=256)
def functions_of(lowered: LoweredScore, slots: tuple[int, ...] = ()) -> TileScoreFunctions:
    """The functions of a program; with `slots` also that of the gradients of these captured tensors."""
    digest, text = text_of(lowered, slots)
    module = module_of(f"score_cutile_{digest}", text)
    functions: dict[str, Any] = {name: getattr(module, f"{name}_{digest}", None) for name in _FUNCTIONS}
    return TileScoreFunctions(**functions, is_additive=lowered.slope is ONE)
