"""Score programs as C++: a struct of static functions of one score each, for kernels to take as a template argument.

    struct Score_<digest> {
      struct Aux {...};        // LoweredScore.fields, a part of a kernel's parameters
      struct Gradients {...};  // LoweredScore.gradient_fields
      static constexpr int SUMS;
      static constexpr bool NEEDS_RAW;
      static float score(float raw, PLACE, const Aux&);  // and score_and_slope(..., float& slope)
      static bool mask(PLACE, const Aux&);
      static void load_gradients(float raw, float dscore, PLACE, const Aux&, const Gradients&, float* sums);
      static void add_sums(int32 b, int32 h, const Aux&, const Gradients&, const float* sums);
    };

PLACE is ``int32 b, h, q, kv, seq_q, seq_kv``. Gradients of elements that depend on batch entry and head alone are
summed by each thread in its `sums`, SUMS floats that start at 0; `add_sums` adds them to memory at the end. Unless
NEEDS_RAW, the slope of the expression is 1 and no gradient is of `raw`.
"""

from __future__ import annotations

import ctypes
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from multiattn.plan.backend import Plan
from multiattn.problem import Problem
from multiattn.score.expression import ONE, Node, inputs_of
from multiattn.score.lower import AuxField, LoweredScore, is_zero, lower
from multiattn.score.printing import DIGEST, INFIX, Language, calls, sign

_PLACE = "int32 b, int32 h, int32 q, int32 kv, int32 seq_q, int32 seq_kv"
_ELEMENTS: Mapping[torch.dtype, tuple[str, str]] = MappingProxyType(
    {
        torch.float64: ("double", "{}"),
        torch.float32: ("float", "{}"),
        torch.float16: ("uint16", "unpack_low<fp16>({})"),
        torch.bfloat16: ("uint16", "unpack_low<bf16>({})"),
        torch.int64: ("int64", "{}"),
        torch.int32: ("int32", "{}"),
        torch.int16: ("short", "{}"),
        torch.int8: ("signed char", "{}"),
        torch.uint8: ("unsigned char", "{}"),
        torch.bool: ("unsigned char", "{} != 0"),
    }
)
"""The C++ type of a captured tensor's elements, and the number that an element is."""


def _literal(constant: Node) -> str:
    value = constant.value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value}LL" if constant.dtype == "i64" else str(value)
    if math.isfinite(value):
        return f"{value!r}f"
    return "(infinity() - infinity())" if math.isnan(value) else "infinity()" if value > 0 else "(-infinity())"


def _address(tensor: str, load: Node, indices: Sequence[str]) -> str:
    """The address of an element, in 64 bits; `tensor` is the field of the pointer to all."""
    terms = [
        f"static_cast<int64>({index}) * {tensor}_stride{axis}"
        for axis, (node, index) in enumerate(zip(load.args, indices, strict=True))
        if not is_zero(node)
    ]
    return " + ".join([tensor, *terms])


def _load(load: Node, indices: Sequence[str], names: Mapping[str, str]) -> str:
    element = names[f"tensor{load.value}"].format(
        f"load_constant({_address(f'aux.tensor{load.value}', load, indices)})"
    )
    return f"static_cast<{LANGUAGE.types[load.dtype]}>({element})"


LANGUAGE = Language(
    types=MappingProxyType({"f32": "float", "i32": "int32", "i64": "int64", "bool": "bool"}),
    ops=MappingProxyType(
        {
            **INFIX,
            **calls("exp2:exp2_approx log2:log2_approx sqrt:sqrt_approx tanh:tanh_approx floor:floorf abs"),
            **{f"{op}:f32": f"{op}_or_nan({{0}}, {{1}})" for op in ("min", "max")},
            **{op: f"{op}({{0}}, {{1}})" for op in ("min", "max")},
            "abs:f32": "fabsf({0})",
            "div": "({0} * reciprocal_approx({1}))",  # `/` is IEEE's, with a slow path
            "neg": "(-{0})",
            "not": "(!{0})",
            "quotient": "({0} / {1})",
            "remainder": "({0} % {1})",
            "where": "({0} ? {1} : {2})",
        }
    ),
    cast="static_cast<{1}>({0})",
    literal=_literal,
    load=_load,
    statement="const {type} {name} = {value};",
)


def lowered_of(plan: Plan) -> LoweredScore | None:
    """The expression that changes the scores of a Plan, or masks blocks of them; with the GPU's own tanh on a GPU."""
    problem = plan.problem
    if problem.score is None or not (problem.has_score or problem.blocks is not None):
        return None
    apart = plan.direction == "backward" and problem.score.scores is not None
    return lower(problem.score.program, approximate=plan.arch.is_gpu, apart=apart)


def slots_of(plan: Plan) -> tuple[int, ...]:
    """The slots of the captured tensors to whose gradients a Plan adds."""
    score = plan.problem.score
    return score.gradients if score is not None and plan.direction == "backward" else ()


def sends_raw(problem: Problem) -> bool:
    """True if a backward needs ``q.k`` itself for the gradients of captured tensors."""
    score = problem.score
    return score is not None and bool(score.gradients) and _needs_raw(lower(score.program), score.gradients)


def _needs_raw(lowered: LoweredScore, slots: Sequence[int]) -> bool:
    return lowered.slope is not ONE or any("raw" in inputs_of(it.slope) for it in lowered.gradients_of(slots))


@functools.lru_cache(maxsize=256)
def text_of(lowered: LoweredScore, slots: tuple[int, ...] = ()) -> tuple[str, str]:
    """Name and text of the struct; with `slots` it has the gradients of these captured tensors."""
    elements = [_ELEMENTS[it.dtype] for it in lowered.program.tensors]
    names = {it.name: f"aux.{it.name}" for it in lowered.fields}
    names |= {f"tensor{slot}": number for slot, (_, number) in enumerate(elements)}
    body: list[str] = _struct("Aux", lowered.fields, [f"const {kind}*" for kind, _ in elements])
    for name, roots in lowered.functions:
        statements, results = LANGUAGE.statements(roots, names)
        raw = "" if name == "mask" else "float raw, "
        slope = ", float& slope" if name == "score_and_slope" else ""
        statements += [f"slope = {it};" for it in results[1:]]
        kind = "bool" if name == "mask" else "float"
        body += _function(
            f"{kind} {name}({raw}{_PLACE}, const Aux& aux{slope})", [*statements, f"return {results[0]};"]
        )
    if lowered.gradients_of(slots):
        body += _gradients(lowered, slots, names)
    comment = "".join(f"// {line}\n" for line in lowered.program.text.splitlines())
    inside = "".join(f"  {line}\n" for line in body)
    digest, text = sign(
        f'{comment}#include "multiattn/ptx_math.cuh"\n\nnamespace multiattn {{\n\n'
        f"struct Score_{DIGEST} {{\n{inside}}};\n\n}}  // namespace multiattn\n"
    )
    return f"Score_{digest}", text


def _gradients(lowered: LoweredScore, slots: Sequence[int], names: Mapping[str, str]) -> Iterator[str]:
    slopes = lowered.gradients_of(slots)
    sums = [it for it in slopes if len(it.summed) == 2]
    yield from _struct("Gradients", lowered.gradient_fields(slots), ["float*"] * len(lowered.program.tensors))
    yield f"static constexpr int SUMS = {len(sums)};"
    yield f"static constexpr bool NEEDS_RAW = {str(_needs_raw(lowered, slots)).lower()};"
    statements, results = LANGUAGE.statements([root for it in slopes for root in (it.slope, *it.load.args)], names)
    statements.append("if (q >= seq_q || kv >= seq_kv || dscore == 0.0f) return;")
    rest = iter(results)
    for it in slopes:
        slope, indices = next(rest), [next(rest) for _ in it.load.args]
        value = "dscore" if it.slope is ONE else f"dscore * ({slope})"
        address = _address(f"gradients.grad{it.load.value}", it.load, indices)
        if it in sums:
            statements.append(f"sums[{sums.index(it)}] += {value};")
        else:
            statements.append(f"{'store_global_4' if it.is_exclusive else 'add_global_4'}({address}, {value});")
    parameters = "const Aux& aux, const Gradients& gradients"
    yield from _function(
        f"void load_gradients(float raw, float dscore, {_PLACE}, {parameters}, float* sums)", statements
    )
    statements, results = LANGUAGE.statements([root for it in sums for root in it.load.args], names)
    rest = iter(results)
    for place, it in enumerate(sums):
        address = _address(f"gradients.grad{it.load.value}", it.load, [next(rest) for _ in it.load.args])
        statements.append(f"add_global_4({address}, sums[{place}]);")
    yield from _function(f"void add_sums(int32 b, int32 h, {parameters}, const float* sums)", statements)


def _struct(name: str, fields: Sequence[AuxField], pointers: Sequence[str]) -> list[str]:
    """A struct of fields; `pointers` are the types of the pointers to tensors, by slot."""
    types = {"f32": "float", "stride": "int64", "size": "int32"}
    lines = [f"  {types.get(it.kind) or pointers[it.slot]} {it.name};" for it in fields]
    return [f"struct {name} {{", *(lines or [f"  int32 {NOTHING};"]), "};"]


def _function(head: str, statements: Sequence[str]) -> list[str]:
    """A function; parameters that it does not use have no name, for which a compiler would warn."""
    name, _, parameters = head.rstrip(")").partition("(")
    used = set(re.findall(r"\w+", " ".join(statements)))
    kept = [it if it.split()[-1] in used else it.rpartition(" ")[0] for it in parameters.split(", ")]
    head = f"{name}({', '.join(kept)})"
    return [f"static DEVICE {head} {{", *(f"  {line}" for line in statements), "}"]


NOTHING = "nothing"
"""The field of a struct that needs none: an empty one has a size that depends on the language."""


def struct_of(fields: Sequence[AuxField]) -> type[ctypes.Structure]:
    """`Aux` or `Gradients` in Python, of the fields of either."""
    types: Mapping[str, Any] = {
        "f32": ctypes.c_float, "pointer": ctypes.c_void_p, "stride": ctypes.c_int64, "size": ctypes.c_int32
    }  # fmt: skip
    declared = [(it.name, types[it.kind]) for it in fields] or [(NOTHING, ctypes.c_int32)]
    return type("Fields", (ctypes.Structure,), {"_fields_": declared})


@functools.lru_cache(maxsize=256)
def with_aux(
    params: type[ctypes.Structure],
    lowered: LoweredScore | None,
    slots: tuple[int, ...] = (),
    lists: type[ctypes.Structure] | None = None,
) -> type[ctypes.Structure]:
    """The struct of a kernel's parameters, and what comes behind them: C++'s ``WithAux``, by a name of its own.

    That is `Aux`; `Gradients` of the tensors in `slots`; `lists` of a block mask, before which the others are, be they
    empty.
    """
    if lowered is None and lists is None:
        return params
    has_gradients = lowered is not None and bool(lowered.gradients_of(slots))
    fields: list[tuple[str, type[ctypes.Structure]]] = [("plain", params)]
    fields.append(("aux", struct_of(lowered.fields if lowered is not None else ())))
    if has_gradients or lists is not None:
        fields.append(("gradients", struct_of(lowered.gradient_fields(slots) if lowered is not None else ())))
    name = params.__name__ if lowered is None else f"{params.__name__}_{text_of(lowered, slots)[0]}"
    if lists is not None:
        fields.append(("lists", lists))
        name += "_lists"
    return type(name, (ctypes.Structure,), {"_fields_": fields})
