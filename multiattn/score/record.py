"""Callables under `torch.compile` and `torch.export`: what they do is recorded there, and traced afterwards.

Dynamo runs a callable as it runs all Python, with its own guards on what that reads, and inlines this file with it. It
cannot inline `multiattn.score.trace`; that traces the recorded calls again, in a function whose result is a constant.
What a callable captures is thus whatever tensors of the graph its calls take, with their gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from multiattn.score.expression import walk
from multiattn.score.named import ScorePlace
from multiattn.score.program import Modification, trace_program
from multiattn.score.serial import dumps
from multiattn.score.trace import CONTROL_FLOW, READERS, UntraceableError
from multiattn.score.transforms import apart

Argument = tuple[str, Any]
"""A kind, and a number, a place in a list, or more of these."""
Step = tuple[Any, Argument, tuple[tuple[str, Argument], ...]]
"""A function, its arguments, and those that have names."""
Spec = tuple[str, str, tuple[int, ...]]
"""Device, dtype and shape of a captured tensor."""
Recorded = tuple[str, tuple[Step, ...], Argument]
"""The name of a callable, its calls, and its result; plain tuples and no tensor, which Dynamo takes for a constant."""

_INDEXING = (torch.Tensor.__getitem__, operator.getitem)


class Recorder(TorchFunctionMode):
    """Records what one callable after the other does to tensors without memory, and collects what they capture.

    Dynamo inlines it: it keeps to lists and comparisons by `is`.
    """

    def __init__(self, device: torch.device, captured: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.device = device
        self.captured = list(captured)
        self.least_size = 2
        """The size that stands for that of a dimension: the indices that are numbers are below."""
        self._name = ""
        self._steps: list[Step] = []
        self._results: list[Any] = []

    def record(self, function: Callable[..., Any], *, has_score: bool) -> Recorded:
        """The calls of `function`, FlexAttention's score_mod or mask_mod."""
        place = [torch.empty((), dtype=torch.int32, device="meta") for _ in ScorePlace._fields[:4]]
        self._results = [torch.empty((), device="meta"), *place] if has_score else place
        self._steps = []
        self._name = getattr(function, "__name__", None) or type(function).__name__
        results = list(self._results)
        with self:
            result = function(*results)
        return self._name, tuple(self._steps), self._argument(result)

    def captured_specs(self) -> tuple[Spec, ...]:
        """Each captured tensor without its memory, with some size for every dimension but those of one element."""
        return tuple(
            (
                str(it.device),
                str(it.dtype).removeprefix("torch."),
                tuple(1 if size == 1 else self.least_size for size in it.shape),
            )
            for it in self.captured
        )

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """The result of a call, without memory, and a record of it."""
        kwargs = kwargs or {}
        if func in _INDEXING:
            func, args = torch.Tensor.__getitem__, (args[0], self._indices(*args))
        arguments = self._argument(args)
        named = tuple((name, self._argument(value)) for name, value in kwargs.items())
        if func is torch.Tensor.__getitem__:
            result: Any = torch.empty(args[0].shape[len(args[1]) :], dtype=args[0].dtype, device="meta")
        elif func in READERS:
            refuse_reader(self._name, func)
        else:
            given = [self._without_memory(it) for it in args]
            result = func(*given, **{name: self._without_memory(it) for name, it in kwargs.items()})
            if not isinstance(result, torch.Tensor):
                return result
        self._steps.append((func, arguments, named))
        self._results.append(result)
        return result

    def _indices(self, tensor: torch.Tensor, index: Any) -> tuple[Any, ...]:
        """Indices of ``tensor[index]``, numbers from the start."""
        indices = []
        for axis, it in enumerate(index if isinstance(index, tuple) else (index,)):
            if type(it) is int and axis < tensor.dim():
                size = tensor.shape[axis]
                if not -size <= it < size:
                    raise IndexError(f"index {it} is out of bounds for a dimension of {size} elements")
                it = it if it >= 0 else it + size
                if _is_known(it):
                    self.least_size = max(self.least_size, it + 1)
            indices.append(it)
        return tuple(indices)

    def _argument(self, value: Any) -> Argument:
        if isinstance(value, torch.Tensor):
            for place, known in enumerate(self._results):
                if known is value:
                    return "result", place
            for place, known in enumerate(self.captured):
                if known is value:
                    return "captured", place
            self.captured.append(value)
            return "captured", len(self.captured) - 1
        if isinstance(value, (tuple, list)):
            return "tuple", tuple(self._argument(it) for it in value)
        if _is_symbol(value):
            return self._argument(self._in_tensor(value))
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return "value", int(value) if isinstance(value, torch.SymInt) else float(value)
        return "value", value

    def _without_memory(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type != "meta":
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        return self._without_memory(self._in_tensor(value)) if _is_symbol(value) else value

    def _in_tensor(self, value: Any) -> torch.Tensor:
        """A number that a graph knows when it runs. In a program it would be what it was when that was compiled."""
        if isinstance(value, float):
            return torch.full((), value, dtype=torch.float32, device=self.device)
        is_short = -(2**31) <= value < 2**31
        return torch.full((), value, dtype=torch.int32 if is_short else torch.int64, device=self.device)


def _is_known(number: Any) -> bool:
    """True if a number is the same whenever the graph runs."""
    from torch.fx.experimental.symbolic_shapes import has_static_value  # imports SymPy

    return has_static_value(number)


def _is_symbol(value: Any) -> bool:
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) and not _is_known(value)


def program_of(
    device: str,
    has: Sequence[bool],
    score: Recorded | None,
    mask: Recorded | None,
    specs: Sequence[Spec],
    of_cache: bool = False,
    last: int | None = None,
    block_sizes: tuple[int, int] | None = None,
) -> tuple[str | None, tuple[int, ...], tuple[int, ...]]:
    """A program as `multiattn.score.serial` writes it, None for none; which captured tensor each slot has, and which
    slots the score depends on.

    `has` says of a softcap, ALiBi's slopes, bias, a bool bias and kinds of blocks if there are any. `specs` are
    `Recorder.captured_specs`; those of what is a tensor of these come first.

    Raises:
        UntraceableError: a callable does what a kernel cannot.
    """

    def trace() -> tuple[str | None, tuple[int, ...], tuple[int, ...]]:
        # On a device of their own: the result of an operation that the recorder missed is there, too.
        captured = [torch.empty((), dtype=getattr(torch, it[1]), device="meta").expand(it[2]) for it in specs]
        first = iter(captured)
        slopes, bias, visible, kinds = (next(first) if is_there else None for is_there in has[1:])
        score_mod, mask_mod = (None if it is None else _runner(it, captured) for it in (score, mask))
        softcap = 1.0 if has[0] else None
        asked = Modification(softcap, slopes, bias, score_mod, visible, mask_mod, of_cache, last, kinds, block_sizes)
        program, tensors = trace_program(torch.device("meta"), asked)
        if not program.roots:
            return None, (), ()
        place_of = {id(it): place for place, it in enumerate(captured)}
        places = tuple(place_of[id(it)] for it in tensors)
        for there, dtype, _ in (specs[it] for it in places):
            if there != device:
                names = ", ".join(it[0] for it in (score, mask) if it is not None)
                got = f"a {dtype} tensor on {there}"
                if there == "meta":
                    got = "the result of an operation that cannot be recorded"
                raise UntraceableError(f"{names}: {got}; allowed tensors on {device}, where q is")
        used = {it.value for it in walk(program.score) if it.op == "load"} if program.score is not None else set()
        return dumps(program), places, tuple(sorted(used))

    return apart(trace)


def refuse_reader(name: str, function: Callable[..., Any]) -> NoReturn:
    """UntraceableError for a callable that takes a number from a tensor."""
    raise UntraceableError(f"{name}: {function.__name__}: {CONTROL_FLOW}")


def _runner(recorded: Recorded, captured: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """A function that makes the recorded calls again, with other tensors."""
    name, steps, result = recorded

    def run(*place: torch.Tensor) -> Any:
        results: list[Any] = list(place)

        def read(argument: Argument) -> Any:
            kind, value = argument
            if kind == "tuple":
                return tuple(read(it) for it in value)
            return results[value] if kind == "result" else captured[value] if kind == "captured" else value

        for function, arguments, named in steps:
            results.append(function(*read(arguments), **{name: read(it) for name, it in named}))
        return read(result)

    run.__qualname__ = name
    return run


program_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
refuse_reader._dynamo_marked_constant = True  # type: ignore[attr-defined]
# As `torch.compiler.assume_constant_result` marks functions; that imports Dynamo, and Triton with it.
