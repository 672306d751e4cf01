"""From a Python callable to expressions, by running it once on stand-ins: 0-d tensors without memory.

PyTorch itself tells the dtype of every result. No data is read, so what is traced holds for every value of the
captured tensors; a Python number that the callable captures is a constant of the expression.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from multiattn.score.arithmetic import DType
from multiattn.score.expression import Node, apply, cast, const, load, read, scalar
from multiattn.score.integers import range_of
from multiattn.score.named import ScorePlace
from multiattn.score.rules import RULES, NoRuleError

aten: Any = torch.ops.aten

KINDS: dict[torch.dtype, DType] = {
    **dict.fromkeys((torch.float64, torch.float32, torch.float16, torch.bfloat16), "f32"),
    **dict.fromkeys((torch.int32, torch.int16, torch.int8, torch.uint8), "i32"),
    torch.int64: "i64",
    torch.bool: "bool",
}
"""The type in an expression of each dtype of a tensor."""

READERS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("item", "tolist", "numpy", "data_ptr", "__array__", "__bool__", "__int__", "__float__", "__index__")
)
"""Functions that give Python a number of a tensor."""
CONTROL_FLOW = (
    "control flow, or a number that Python takes from a tensor: one expression serves all scores, so no score has a "
    "branch of its own; allowed torch.where(condition, x, y) for `if`, & | ~ for `and` `or` `not`, tensors as they are"
)
_NUMPY = "NumPy reads numbers, and a stand-in of scores has none; allowed PyTorch's functions, as torch.tanh"
A_MASK = (
    "a result of bool; allowed a number, the changed score. A mask_mod, which tells what a query sees, goes to "
    "block_mask=create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN); or return torch.where(mask, score, -float('inf'))"
)
TAKES = {
    4: "allowed (b, h, q_idx, kv_idx) -> bool, a mask_mod; one of a score first is a score_mod",
    5: "allowed (score, b, h, q_idx, kv_idx) -> score. A mask_mod, which has no score, goes to "
    "block_mask=create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)",
}
"""Arguments that a callable takes, by the number of arguments that it is given."""
_OPERATIONS = (
    "arithmetic, comparisons, logic, where, masked_fill, minimum, maximum, clamp, relu, abs, sign, floor, ceil, trunc, "
    "round, exp, exp2, log, log2, sqrt, rsqrt, pow, sin, cos, tanh, sigmoid, erf, //, %, div, fmod, >>, "
    "captured[index], and what PyTorch decomposes into these"
)


class UntraceableError(NotImplementedError):
    """A callable does what a kernel cannot; the message names it and what is accepted.

    Not a TypeError: of an operator that raises one, Python tries the reflected operator, and the message is lost.
    """


class Tracer(TorchDispatchMode):
    """Collects the expressions of the callables that it traces, and the tensors that they capture, by slot."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.tensors: list[torch.Tensor] = []
        """The captured tensors; one that is captured twice has one slot."""
        self._nodes: dict[int, Node] = {}
        self._parts: dict[int, tuple[torch.Tensor, tuple[Node, ...]]] = {}
        """Captured tensors that have some of their indices: stand-ins of the rest."""
        self._keep: list[torch.Tensor] = []  # an id must not come twice
        self._traced: Callable[..., Any] | None = None
        self._is_own = False  # an operator is this class's, not the callable's

    @property
    def place(self) -> ScorePlace:
        """Stand-ins of where a score is, new ones each time: a callable may write to its own."""
        return ScorePlace(*(self.stand_in(read(name), torch.int32) for name in ScorePlace._fields))

    @property
    def place_in_cache(self) -> ScorePlace:
        """Stand-ins of where a score is, by the position that its query has among all keys of its sequence."""
        before = apply("sub", read("seq_kv"), read("seq_q"))
        return self.place._replace(q=self.stand_in(apply("add", read("q"), before), torch.int32))

    def stand_in(self, node: Node, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor that stands for a node. Each is an object of its own, by which it is known."""
        return self._bind(self._empty((), (), dtype), node)

    def _empty(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor without memory that no callable made."""
        self._is_own = True
        try:
            return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        finally:
            self._is_own = False

    def scalar(self, name: str) -> torch.Tensor:
        """The stand-in of a runtime scalar."""
        return self.stand_in(scalar(name))

    def trace(self, function: Callable[..., Any], *args: Any, dtype: DType) -> Node:
        """The result of `function` for these stand-ins and captured tensors.

        Raises:
            UntraceableError: an operation outside the set, control flow, a tensor elsewhere.
            Exception: whatever `function` raises itself.
        """
        self._traced = function
        self._check_takes(function, len(args))
        with torch.no_grad(), _Functions(self), self:
            result = function(*args)
        if isinstance(result, torch.Tensor) and result.dim():
            raise self.refusal(f"a result of shape {tuple(result.shape)}; allowed one number")
        if not isinstance(result, torch.Tensor | bool | int | float):
            hint = "return the changed score" if dtype == "f32" else "return whether the query sees the key"
            raise self.refusal(f"a result of {type(result).__name__}; allowed a tensor of one number; {hint}")
        node = self.node(result)
        if dtype == "f32" and node.dtype == "bool":
            raise self.refusal(A_MASK)
        if dtype == "bool" and node.dtype != "bool":
            raise self.refusal(f"a result of {node.dtype}; allowed a bool: does the query see the key?")
        return cast(node, dtype)

    def _check_takes(self, function: Callable[..., Any], count: int) -> None:
        """Refuses a callable that does not take so many arguments: Python would not say which it is given."""
        try:
            takes = inspect.signature(function)
        except (TypeError, ValueError):  # one that has no signature
            return
        try:
            takes.bind(*(None,) * count)
        except TypeError:
            raise self.refusal(f"it takes {takes}; {TAKES.get(count, f'allowed {count} arguments')}") from None

    def refusal(self, problem: str) -> UntraceableError:
        """The error of the callable that is being traced."""
        name = getattr(self._traced, "__qualname__", None) or type(self._traced).__name__
        return UntraceableError(f"{name}: {problem}")

    # ------------------------------------------------------------ tensors and nodes

    def _bind(self, tensor: torch.Tensor, node: Node) -> torch.Tensor:
        self._keep.append(tensor)
        self._nodes[id(tensor)] = node
        return tensor

    def node(self, value: Any, dtype: DType | None = None) -> Node:
        """The node of a stand-in, a number or a captured 0-d tensor, as `dtype` if one is given."""
        if not isinstance(value, torch.Tensor):
            kind: DType = "bool" if isinstance(value, bool) else "f32" if isinstance(value, float) else "i32"
            if kind == "i32" and not -(2**31) <= value < 2**31:
                kind = "i64"
            bits = 32 if dtype == "i32" else 64
            if isinstance(value, int) and dtype != "f32" and not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
                raise self.refusal(
                    f"the number {value} among int{bits}; allowed {-(2 ** (bits - 1))} to {2 ** (bits - 1) - 1}. b, h, "
                    f"q_idx and kv_idx are int32: .long() makes int64 of them, .float() floats"
                )
            found = const(value, kind)
        elif id(value) in self._nodes:
            found = self._nodes[id(value)]
        elif value.dim() == 0 and id(value) not in self._parts:
            found = load(self._slot(value), KINDS[value.dtype], ())
            self._bind(value, found)
        else:
            raise self.refusal(f"{self._name(value)} as a whole; allowed one element of it, as by b, h, q_idx, kv_idx")
        return found if dtype is None else cast(found, dtype)

    def _slot(self, tensor: torch.Tensor) -> int:
        for slot, known in enumerate(self.tensors):
            if known is tensor:
                return slot
        if tensor.device != self.device:
            raise self.refusal(f"{self._name(tensor)} on {tensor.device}; allowed {self.device}, where q is")
        if tensor.dtype not in KINDS:
            allowed = ", ".join(str(it).removeprefix("torch.") for it in KINDS)
            raise self.refusal(f"{self._name(tensor)} of {tensor.dtype}; allowed {allowed}")
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _name(self, tensor: torch.Tensor) -> str:
        """How the callable calls a captured tensor, if that can be told, and its shape."""
        tensor = self._parts.get(id(tensor), (tensor,))[0]
        shape = f"a tensor of shape {tuple(tensor.shape)}"
        if inspect.isfunction(self._traced):
            seen = inspect.getclosurevars(self._traced)
            for name, value in (*seen.nonlocals.items(), *seen.globals.items()):
                if value is tensor:
                    return f"{name}, {shape},"
        return f"{shape}"

    # ------------------------------------------------------------ operations

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """The stand-in of an operator's result."""
        kwargs = kwargs or {}
        if self._is_own:
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            raise self.refusal(CONTROL_FLOW)
        given = [it for it in (*args, *kwargs.values()) if isinstance(it, torch.Tensor)]
        for tensor in given:
            if tensor.dim():
                self.node(tensor)  # raises
        namespace, _, name = func._schema.name.partition("::")
        if func._schema.is_mutable:
            for written in _written(func, args, kwargs):
                if id(written) not in self._nodes or self._nodes[id(written)].op == "load":
                    raise self.refusal(
                        f"{func}, which writes to a captured tensor; allowed operations without an effect"
                    )
            name = name.removesuffix("_")
        if namespace != "aten" or name not in RULES:
            return self._decomposed(func, args, kwargs)
        self._check_short(args, given)
        if name in ("lift_fresh", "lift_fresh_copy") and id(args[0]) not in self._nodes:
            return self.stand_in(const(args[0].item(), self._kind(args[0].dtype)), args[0].dtype)  # torch.tensor(0.5)
        kwargs = {it: value for it, value in kwargs.items() if it not in ("device", "layout", "pin_memory")}
        like = func(*args, **kwargs, **({"device": "meta"} if not given else {}))
        if like.dim():
            hint = "make a tensor outside, and capture it"
            raise self.refusal(f"{func} of shape {tuple(like.shape)}; allowed numbers; {hint}")
        rest = {it: value for it, value in kwargs.items() if it not in _NO_MATTER}
        try:
            node = RULES[name](self.node, self._kind(like.dtype), *args, **rest)
        except NoRuleError as error:
            raise self.refusal(f"{func} of {error}") from None
        is_as_given = any(it.dtype == like.dtype and self._nodes.get(id(it)) is node for it in given)
        return self._bind(like, node if is_as_given else _in_bits(node, like.dtype))

    def _check_short(self, args: Sequence[Any], given: Sequence[torch.Tensor]) -> None:
        """Refuses a number beside integers of fewer bits than it has: PyTorch takes another, as 255 for a uint8 -1."""
        dtype = functools.reduce(torch.promote_types, (it.dtype for it in given), torch.bool)
        if dtype not in _SHORT:
            return
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        for value in args:
            if isinstance(value, int) and not least <= value <= most:
                name = str(dtype).removeprefix("torch.")
                raise self.refusal(f"the number {value} among {name}; allowed {least} to {most}. .int() makes int32")

    def _kind(self, dtype: torch.dtype) -> DType:
        if dtype not in KINDS:
            allowed = ", ".join(str(it).removeprefix("torch.") for it in KINDS)
            raise self.refusal(f"a number of {dtype}; allowed {allowed}")
        return KINDS[dtype]

    def _decomposed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operator as PyTorch writes it with others."""
        from torch._decomp import decomposition_table

        simpler = decomposition_table.get(func)
        if simpler is None:
            raise self.refusal(f"{func}; allowed {_OPERATIONS}")
        try:
            with self, _Functions(self):
                return simpler(*args, **kwargs)
        except UntraceableError as error:
            raise self.refusal(f"{func}; allowed {_OPERATIONS}") from error

    def index(self, tensor: torch.Tensor, indices: Sequence[Any]) -> torch.Tensor:
        """The stand-in of ``tensor[indices]``, or of what is left of it after some of its indices."""
        base, before = self._parts.get(id(tensor), (tensor, ()))
        if len(before) + len(indices) > base.dim():
            count = len(before) + len(indices)
            raise self.refusal(f"{self._name(tensor)} with {count} indices; allowed one for each of its dimensions")
        nodes = list(before)
        for it in indices:
            node, size = self.node(it), base.shape[len(nodes)]
            if node.dtype not in ("i32", "i64"):
                raise self.refusal(f"{self._name(tensor)} indexed by {node.dtype}; allowed integers")
            if node.op == "const":
                if not -size <= node.value < size:
                    raise IndexError(f"index {node.value} is out of bounds for a dimension of {size} elements")
                node = const(node.value % size, "i32")
            nodes.append(node)
        rest = self._empty(base.shape[len(nodes) :], base.stride()[len(nodes) :], base.dtype)
        if rest.dim():
            self._keep.append(rest)
            self._parts[id(rest)] = base, tuple(nodes)
            return rest
        slot = self._slot(base)
        return self._bind(rest, load(slot, KINDS[base.dtype], nodes))

    def as_stand_in(self, value: Any) -> Any:
        """An argument of a function, or a list of some, with stand-ins in the places of captured tensors.

        PyTorch computes nothing of a tensor that `torch.func` wraps where the transform is not active.
        """
        if isinstance(value, (tuple, list)):
            return type(value)(map(self.as_stand_in, value))
        if not isinstance(value, torch.Tensor) or id(value) in self._nodes or id(value) in self._parts:
            return value
        return self.index(value, ())


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator writes to."""
    given = {it.name: value for it, value in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
    names = [it.name for it in func._schema.arguments if it.alias_info is not None and it.alias_info.is_write]
    return [given[name] for name in names if name in given]


_NO_MATTER = frozenset(("dtype", "non_blocking", "memory_format", "out"))
"""Arguments that are in the result's dtype, or in where it goes."""
_SHORT = {torch.uint8: (0, 255), torch.int8: (128, 255), torch.int16: (32768, 65535)}


def _in_bits(node: Node, dtype: torch.dtype) -> Node:
    """An integer of fewer than 32 bits, which wraps around as PyTorch's does."""
    if dtype not in _SHORT or range_of(node) == (0, 1):
        return node
    half, ones = (const(it, "i32") for it in _SHORT[dtype])
    return apply("sub", apply("and", apply("add", node, half), ones), half)


class _Functions(TorchFunctionMode):
    """Takes ``tensor[index]`` before PyTorch looks at its parts, and refuses what reads a tensor in Python."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """The function, or the tracer's in its place."""
        if func in READERS:
            why = _NUMPY if func.__name__ in ("__array__", "numpy") else CONTROL_FLOW
            raise self.tracer.refusal(f"{func.__name__}: {why}")
        if func is torch.Tensor.__getitem__:
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            for it in indices:
                is_number = (isinstance(it, torch.Tensor) and it.dim() == 0) or type(it) is int
                if not is_number:
                    raise self.tracer.refusal(f"an index {it!r}; allowed b, h, q_idx, kv_idx, and integers of these")
            return self.tracer.index(args[0], indices)
        kwargs = kwargs or {}
        if func.__name__ != "__get__":  # an attribute is that of the tensor itself
            args = self.tracer.as_stand_in(args)
            kwargs = {name: self.tracer.as_stand_in(it) for name, it in kwargs.items()}
        return func(*args, **kwargs)
