"""`launch`: the grid, and the dispatch of `cuda.tile`'s functions to their rules."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile._dispatch_mode import DispatchMode
from cuda.tile._execution import is_stub

from multiattn.cutile.cpu import arithmetic, memory
from multiattn.cutile.cpu.memory import Array, Ledger, Run
from multiattn.cutile.cpu.tile import as_tile
from multiattn.plan.support import OutOfBoundsError
from multiattn.progress import interpreting
from multiattn.run.threads import one_thread

RULES: dict[str, Callable[..., Any]] = {**arithmetic.RULES, **memory.RULES}
"""Every op the interpreter has a rule for, by its name in `cuda.tile`; `bid` and `num_blocks` come with a launch."""


class Interpreter(DispatchMode):  # type: ignore[misc] # cuda.tile is untyped
    """While current, a call of a `cuda.tile` function means its rule, and of a ``@ct.function`` its body."""

    def __init__(self, run: Run) -> None:
        self.rules: dict[str, Callable[..., Any]] = {
            **RULES,
            "bid": lambda axis: run.block[axis],
            "num_blocks": lambda axis: run.grid[axis],
            **dict.fromkeys(("grid_dependency_control_wait", "grid_dependency_control_launch_dependents"), _nothing),
        }

    def call_tile_function_from_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a rule or a body: the method that cuda.tile asks of a dispatch mode."""
        if not is_stub(func):
            return func.__wrapped__(*args, **kwargs)
        rule = self.rules.get(func.__name__ if func.__name__ != "__init__" else func.__qualname__.partition(".")[0])
        if rule is None:
            raise NotImplementedError(f"ct.{func.__qualname__} has no rule in the interpreter")
        return rule(*args, **kwargs)


def _nothing() -> None:
    """One kernel runs after another here."""


def launch(grid: Sequence[int], kernel: Any, args: Sequence[Any], *, seed: int = 0) -> None:
    """Run every block of `grid` of a ``@ct.kernel`` on CPU tensors, in a random order that `seed` determines.

    Args:
        grid: one to three counts of blocks.
        kernel: the object that ``@ct.kernel`` makes.
        args: its arguments, as for `cuda.tile.launch`: CPU tensors, numbers, tuples of these, constants.
        seed: of the order of blocks.

    Raises:
        OutOfBoundsError, DataRaceError: what a GPU would let pass.
        NotImplementedError: an op that has no rule here, by name.
        TypeError: a tensor that is not on the CPU.
        cuda.tile.TileTypeError: what cuTile's type checker refuses, as far as it is modelled.
    """
    run = Run(grid=(*map(int, grid), 1, 1, 1)[:3])
    annotated = kernel._annotated_function
    blocks = list(enumerate(itertools.product(*map(range, run.grid)), start=1))
    random.Random(seed).shuffle(blocks)
    with _on_cpu(), Interpreter(run).as_current(), torch.no_grad(), one_thread():
        ledgers, nodes = _ledgers(args, run), annotated.parameter_annotations
        values = [_device_value(value, node, ledgers) for value, node in zip(args, nodes, strict=True)]
        name = getattr(annotated.pyfunc, "__name__", "")
        with interpreting(f"the cuTile kernel {name}", len(blocks), unit="block") as work:
            for run.number, run.block in work.over(blocks):
                annotated.pyfunc(*values)


def _on_cpu() -> contextlib.AbstractContextManager[Any]:
    """Makes new tensors CPU tensors whatever the default device; where it is the CPU, the context would cost a half."""
    return contextlib.nullcontext() if torch.empty(0).device.type == "cpu" else torch.device("cpu")


_Memory = tuple[int, torch.dtype]
_INT32_MAX = 2**31 - 1


def _memory_of(tensor: torch.Tensor) -> _Memory:
    """The storage that a tensor is a view of, and its dtype; TypeError for one that is not on the CPU."""
    if tensor.device.type != "cpu":
        raise TypeError(f"the interpreter runs on CPU tensors; got one on {tensor.device}")
    return tensor.untyped_storage().data_ptr(), tensor.dtype


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple):
            yield from _flat(value)
        else:
            yield value


def _ledgers(args: Sequence[Any], run: Run) -> dict[_Memory, Ledger]:
    """One for all tensors that share a memory."""
    views: dict[_Memory, list[torch.Tensor]] = {}
    for value in _flat(args):
        if isinstance(value, torch.Tensor):
            views.setdefault(_memory_of(value), []).append(value)
    return {memory: Ledger(tensors, run) for memory, tensors in views.items()}


def _device_value(value: Any, annotation: Any, ledgers: dict[_Memory, Ledger]) -> Any:
    if isinstance(value, tuple):
        each = getattr(annotation, "each", None)  # None where the kernel leaves it to cuTile
        return tuple(_device_value(it, each, ledgers) for it in value)
    if isinstance(value, torch.Tensor):
        index_dtype = annotation.array.index_dtype if annotation and annotation.array else ct.int32
        last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        if index_dtype != ct.int64 and max((last, *value.stride())) > _INT32_MAX:
            raise OutOfBoundsError(f"offsets up to {last}, in an array that is indexed with 32 bits")
        return Array(value, ledgers[_memory_of(value)])
    is_constant = getattr(annotation, "constant", False)
    return as_tile(value) if isinstance(value, float) and not is_constant else value
