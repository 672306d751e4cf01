"""Score programs as C++: a struct of static functions of one score each, for kernels to take as a template argument.

    struct Score_<digest> {
      struct Aux {...};        // LoweredScore.fields, a part of a kernel's parameters
      struct Gradients {...};  // LoweredScore.gradient_fields
      static constexpr int SUMS;
      static constexpr bool NEEDS_RAW;
      static float score(float raw, PLACE, const Aux&);  // and score_and_slope(..., float& slope)
      static float exponent_and_slope(float raw, float lse, PLACE, const Aux&, float& slope);
      static bool mask(PLACE, const Aux&);
      static float tail(PLACE, const Aux&);  // of no place
      static void load_gradients(float raw, float dscore, PLACE, const Aux&, const Gradients&, float* sums);
      static void add_sums(int32 b, int32 h, const Aux&, const Gradients&, const float* sums);
    };

PLACE is ``int32 b, h, q, Position kv, int32 seq_q, seq_kv``; a Position is what keys of an unrolled loop have in common
and a constant. For an exponent, the score less the lse of its row, q is a Position too. Gradients of elements that
depend on batch entry and head alone are summed by each thread in its `sums`, SUMS floats that start at 0; `add_sums`
adds them to memory at the end. Unless NEEDS_RAW, the slope of the expression is 1 and no gradient is of `raw`.
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

from multiattn.cuda import structs
from multiattn.plan.backend import Plan
from multiattn.problem import Problem
from multiattn.score.expression import ONE, Node, apply, cast, const, inputs_of, make, read, rebuild, replace, walk
from multiattn.score.integers import limits, may_wrap
from multiattn.score.lower import AuxField, LoweredScore, is_zero, lower
from multiattn.score.printing import DIGEST, INFIX, Language, calls, sign

_PLACE = "int32 b, int32 h, int32 q, Position kv, int32 seq_q, int32 seq_kv"
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
        suffix = "LL" if constant.dtype == "i64" else ""
        least = value == limits(constant)[0]  # C++ has no such literal, only the negative of one that is too large
        return f"({value + 1}{suffix} - 1)" if least else f"{value}{suffix}"
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


_WRAPPING: Mapping[str, str] = MappingProxyType({op: f"wrapping_{op}" for op in ("add", "sub", "mul")})


def _defined(root: Node) -> Node:
    """The expression without what C++ leaves undefined: integers that leave their type, divisions by what may be 0."""
    made: dict[Node, Node] = {}
    for node in walk(root):
        op, args = node.op, [made[it] for it in node.args]
        if may_wrap(node):
            args = [const(0, node.dtype), *args] if op == "neg" else args
            op = _WRAPPING["sub" if op == "neg" else op]
        elif op in ("quotient", "remainder") and args[1].op != "const":
            op = f"{op}_by_any"
        made[node] = make(op, node.dtype, tuple(args), node.value)
    return made[root]


LANGUAGE = Language(
    types=MappingProxyType({"f32": "float", "i32": "int32", "i64": "int64", "bool": "bool"}),
    ops=MappingProxyType(
        {
            **INFIX,
            **calls("exp2:exp2_approx log2:log2_approx sqrt:sqrt_approx tanh:tanh_approx floor:floorf abs"),
            **calls("sqrt_rn sin:sinf cos:cosf"),
            **{op: f"{op}({{0}}, {{1}})" for op in ("mul_rn", "div_rn", *_WRAPPING.values())},
            **{f"{op}_by_any": f"{op}({{0}}, {{1}})" for op in ("quotient", "remainder")},
            "fmod": "fmodf({0}, {1})",
            **{f"{op}:f32": f"{op}_or_nan({{0}}, {{1}})" for op in ("min", "max")},
            **{op: f"{op}({{0}}, {{1}})" for op in ("min", "max")},
            "abs:f32": "fabsf({0})",
            "abs:i64": "llabs({0})",
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


# ---------------------------------------------------------------- distances of keys


def _names_of_position(name: str) -> Mapping[str, str]:
    """The parts of a ``Position``: all of it, what many keys have in common, and the constant of one key."""
    return {name: f"{name}.index()", f"{name}_base": f"{name}.base", f"{name}_step": f"{name}.step"}


_OF_KEY, _OF_BOTH = ("kv",), ("q", "kv")
"""The positions that are a ``Position`` for scores, and for exponents."""
_MONOTONE = frozenset(("abs", "neg", "min", "max"))
"""Operations that may come before or after a conversion to fp32: rounding keeps order, and is alike for both signs."""


def _with_distances(root: Node, positions: Sequence[str]) -> Node:
    """The expression with the conversion of sums like ``A - kv`` (ALiBi) moved out of the loop over keys.

    ``A - base`` is an integer, and becomes a float once for many keys; a key's own step is then subtracted in fp32. The
    result is exact up to 2^24. Beyond that it is rounded twice, and so is right within 2^-23 of itself, as steps are
    less than 2^24 and do not cancel it. With two positions their steps are one constant.
    """
    made: dict[Node, Node] = {}
    for node in walk(root):
        args = [made[it] for it in node.args]
        found = _as_float(node.args[0], positions) if node.op == "cast" and node.dtype == "f32" else None
        made[node] = rebuild(node, args) if found is None else found
    return made[root]


def _as_float(node: Node, positions: Sequence[str]) -> Node | None:
    """An i32 expression of `positions` as fp32; None where it is no such sum, or one that may wrap around."""
    if node.dtype != "i32" or any(map(may_wrap, walk(node))):
        return None
    if node.op in _MONOTONE and inputs_of(node) & {*positions}:
        parts = [_as_float(it, positions) if inputs_of(it) & {*positions} else cast(it, "f32") for it in node.args]
        return None if None in parts else apply(node.op, *(it for it in parts if it is not None))
    alone = ((it,) for it in positions)
    signs = next((found for them in (positions, *alone) if (found := _signs_of(node, them))), None)
    if signs is None:
        return None
    bases = {read(it): make("input", "i32", (), f"{it}_base") for it in signs}
    steps = [make("input", "i32", (), f"{it}_step") for it in sorted(signs, key=lambda it: -signs[it])]
    step = steps[0] if len(steps) == 1 else apply("add" if len({*signs.values()}) == 1 else "sub", *steps)
    return apply("add" if max(signs.values()) > 0 else "sub", cast(replace(node, bases), "f32"), cast(step, "f32"))


def _signs_of(node: Node, positions: Sequence[str]) -> dict[str, int] | None:
    """The sign of each position, of those that are one term of a sum each; None where one is something else."""
    if node.op == "input" and node.value in positions:
        return {node.value: 1}
    if not inputs_of(node) & {*positions}:
        return {}
    if node.op not in ("add", "sub", "neg"):
        return None
    signs: dict[str, int] = {}
    for place, it in enumerate(node.args):
        found = _signs_of(it, positions)
        if found is None or signs.keys() & found.keys():
            return None
        flips = node.op == "neg" or (node.op == "sub" and place == 1)
        signs |= {name: -sign if flips else sign for name, sign in found.items()}
    return signs


def lowered_of(plan: Plan, *, exponents: bool = False) -> LoweredScore | None:
    """The expression that changes the scores of a Plan, or masks blocks of them; with the GPU's own tanh on a GPU.

    `exponents`: for a kernel that has them; see `LoweredScore`.
    """
    problem = plan.problem
    if problem.score is None or not (problem.has_score or problem.has_tail or problem.blocks is not None):
        return None
    apart = plan.direction == "backward" and problem.score.scores is not None
    return lower(problem.score.program, approximate=plan.arch.is_gpu, apart=apart, exponents=exponents)


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
    names = {**_names_of_position("kv"), **{it.name: f"aux.{it.name}" for it in lowered.fields}}
    names |= {f"tensor{slot}": number for slot, (_, number) in enumerate(elements)}
    body: list[str] = _struct("Aux", lowered.fields, [f"const {kind}*" for kind, _ in elements])
    for name, roots in lowered.functions:
        is_exponent = name == "exponent_and_slope"
        own = {**names, **_names_of_position("q")} if is_exponent else names
        statements, results = _statements(roots, own, _OF_BOTH if is_exponent else _OF_KEY)
        raw = "" if name in ("mask", "tail") else "float raw, float lse, " if is_exponent else "float raw, "
        place = _PLACE.replace("int32 q", "Position q") if is_exponent else _PLACE
        slope = ", float& slope" if len(results) > 1 else ""
        statements += [f"slope = {it};" for it in results[1:]]
        kind = "bool" if name == "mask" else "float"
        body += _function(f"{kind} {name}({raw}{place}, const Aux& aux{slope})", [*statements, f"return {results[0]};"])
    if lowered.gradients_of(slots):
        body += _gradients(lowered, slots, names)
    comment = "".join(f"// {line}\n" for line in lowered.program.text.splitlines())
    inside = "".join(f"  {line}\n" for line in body)
    digest, text = sign(
        f'{comment}#include "multiattn/ptx_math.cuh"\n#include "multiattn/score.cuh"\n\nnamespace multiattn {{\n\n'
        f"struct Score_{DIGEST} {{\n{inside}}};\n\n}}  // namespace multiattn\n"
    )
    return f"Score_{digest}", text


def _statements(
    roots: Sequence[Node], names: Mapping[str, str], positions: Sequence[str] = _OF_KEY
) -> tuple[list[str], list[str]]:
    return LANGUAGE.statements([_defined(_with_distances(it, positions)) for it in roots], names)


def _gradients(lowered: LoweredScore, slots: Sequence[int], names: Mapping[str, str]) -> Iterator[str]:
    slopes = lowered.gradients_of(slots)
    sums = [it for it in slopes if len(it.summed) == 2]
    yield from _struct("Gradients", lowered.gradient_fields(slots), ["float*"] * len(lowered.program.tensors))
    yield f"static constexpr int SUMS = {len(sums)};"
    yield f"static constexpr bool NEEDS_RAW = {str(_needs_raw(lowered, slots)).lower()};"
    statements, results = _statements([root for it in slopes for root in (it.slope, *it.load.args)], names)
    statements.append("if (q >= seq_q || kv.index() >= seq_kv || dscore == 0.0f) return;")
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
    statements, results = _statements([root for it in sums for root in it.load.args], names)
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
    tiles: type[ctypes.Structure] | None = None,
) -> type[ctypes.Structure]:
    """The struct of a kernel's parameters, and what comes behind them: C++'s ``WithAux``, by a name of its own.

    That is `tiles`, the lists of a packed batch; `Aux`; `Gradients` of the tensors in `slots`; `lists` of a block mask,
    or how tiles are divided, before which the latter two are, be they empty.
    """
    if lowered is None and lists is None and tiles is None:
        return params
    has_gradients = lowered is not None and bool(lowered.gradients_of(slots))
    fields: list[tuple[str, type[ctypes.Structure]]] = [("plain", params)]
    name = params.__name__ if lowered is None else f"{params.__name__}_{text_of(lowered, slots)[0]}"
    if tiles is not None:
        fields.append(("lists", tiles))
        name += "_packed"
    if lowered is not None or lists is not None:
        fields.append(("aux", struct_of(lowered.fields if lowered is not None else ())))
    if has_gradients or lists is not None:
        fields.append(("gradients", struct_of(lowered.gradient_fields(slots) if lowered is not None else ())))
    if lists is not None:
        fields.append(("lists", lists))
        name += f"_{lists.__name__}"  # several kinds may meet in one translation unit
    return structs.struct_of(name, fields)
