"""Parts of the Gluon kernel as Python, with NumPy in place of Gluon's language. All of it is interpreted elsewhere."""

import re
import types

import numpy as np
from triton.experimental.gluon import language as gl
from triton.runtime.jit import KernelInterface


class Array(np.ndarray):
    """An array that may be asked what a tensor of Gluon is asked."""

    type = types.SimpleNamespace(layout=None)

    def to(self, dtype):
        return self


class Pointer:
    """An address in a tensor of the caller's, as a load takes it: in elements."""

    def __init__(self, memory, at=0):
        self.memory, self.at = memory, at

    def __add__(self, elements):
        return Pointer(self.memory, self.at + elements)

    def load(self):
        return np.asarray(self.memory[self.at]).view(Array)


def inline(text, constraints, operands, *rest, **options):
    """The PTX of a tanh, that of the mask (one of two values, by how a number compares with another), and no other."""
    if text.startswith("tanh"):
        return np.tanh(operands[0])
    compare = r"setp\.(\w+)\.([su])32 p, \$2, (\S+); selp\.f32 \$0, \$1, 0f(\w+), p;"
    verb, sign, limit, other = re.search(compare, text).groups()
    scores, number, *limits = operands
    limits = limits[0] if limit == "$3" else int(limit)
    if sign == "u":
        number, limits = np.asarray(number) & 0xFFFFFFFF, np.asarray(limits) & 0xFFFFFFFF
    compared = {"gt": np.greater, "ge": np.greater_equal, "lt": np.less}[verb](number, limits)
    return np.where(compared, scores, np.uint32(int(other, 16)).view(np.float32))


def language(memory, sink=None):
    """As much of Gluon's language as a consumer needs."""

    def store(pointers, values, mask):
        memory[pointers[mask]] = values[mask]

    return types.SimpleNamespace(
        arange=lambda begin, end, layout: np.arange(begin, end).view(Array),
        full=lambda shape, value, dtype, layout: np.full(shape, value).view(Array),
        convert_layout=lambda values, layout: values,
        SliceLayout=lambda *axes: None,
        **{name: getattr(np, name) for name in ("sum", "max", "maximum", "minimum", "where", "exp2", "log2", "abs")},
        float32=None, int64=None, inline_asm_elementwise=inline, store=store,
        cast=lambda values, dtype: values,
        load=lambda pointer: pointer.load() if isinstance(pointer, Pointer) else np.asarray(sink).view(Array),
    )  # fmt: skip


def as_python(jitted, fakes):
    """A jitted function, and all that it calls, with `fakes` in place of what they name."""

    def stands_for(name, value):
        if name in fakes:
            return fakes[name]
        if isinstance(value, types.ModuleType):
            parts = {part: stands_for(part, getattr(value, part)) for part in code.co_names if hasattr(value, part)}
            return types.SimpleNamespace(**parts)
        if isinstance(value, KernelInterface):
            return as_python(value, fakes)
        return value.value if isinstance(value, gl.constexpr) else value

    code, names = jitted.fn.__code__, jitted.fn.__globals__
    mine = {name: stands_for(name, names[name]) for name in code.co_names if name in names}
    return types.FunctionType(code, mine)


def scores_in_python(functions):
    """The generated functions of an expression, as jitted."""
    made = {name: getattr(functions, name) for name in ("once", "ahead", "rest")}
    fakes = {"tl": language(None), "gl": language(None)}
    return types.SimpleNamespace(**{name: it and as_python(it, fakes) for name, it in made.items()})
