"""Run a Gluon kernel's own source on CPU tensors: `run`."""

from __future__ import annotations

from typing import Any

import torch

from multiattn.progress import interpreting
from multiattn.run.threads import one_thread
from multiattn.triton.cpu.gluon.errors import GluonError
from multiattn.triton.cpu.gluon.machine import Machine, runs
from multiattn.triton.cpu.gluon.source import as_python
from multiattn.triton.cpu.gluon.tensors import MappedTensor, Memory
from multiattn.triton.cpu.gluon.values import Value, lift
from multiattn.triton.cpu.interpreter import exclusive_language, flat, with_functions


def run(kernel: Any, grid: int, *args: Any, num_warps: int = 4, seed: int | None = None, **kwargs: Any) -> None:
    """Run every program of a one-dimensional grid of a ``@gluon.jit`` kernel, one after another.

    Args:
        kernel: the kernel.
        grid: number of programs.
        args, kwargs: of the kernel: CPU tensors, Gluon's tensor descriptors, numbers, None, tuples of these, constants.
        num_warps: of the kernel, and of the default partition.
        seed: of the order in which partitions go on and loads land; None for one in which partitions go on as far as
            they can, and loads land as late as they can.

    Raises:
        OutOfBoundsError: an access outside of its tensor.
        GluonError: what hardware or compiler would not take, or leave undefined. See `errors`.
        Exception: whatever the kernel raises, untouched.
    """
    with exclusive_language:
        function = as_python(kernel)
        given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        constants = {name for name, kind in kernel.fn.__annotations__.items() if "constexpr" in str(kind)}
        values = {
            name: with_functions(value, as_python) if name in constants else _argument(value)
            for name, value in given.items()
        }
        # A thread of Python that computes would get as many more of its own.
        with one_thread(), interpreting(f"the Gluon kernel {kernel.fn.__name__}", grid) as work:
            for program in work.over(range(grid)):
                machine = Machine(program, grid, num_warps, seed)
                given_values = (it for it in flat(values.values()) if isinstance(it, Value))
                machine.memories += [it.memory for it in given_values if it.memory is not None]
                _run_program(machine, function, values)


def _run_program(machine: Machine, function: Any, values: dict[str, Any]) -> None:
    with runs(machine), torch.no_grad():
        function(**values)
        machine.current.check_done()
        if machine.in_flight:
            raise GluonError(f"program {machine.program} ends with {len(machine.in_flight)} loads by TMA under way")


def _argument(value: Any) -> Any:
    """An argument as the kernel gets it: a number has the type that it has when compiled, a 1 too."""
    if isinstance(value, tuple):
        items = map(_argument, value)
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    if isinstance(value, torch.Tensor):
        return Memory.of(value).pointer
    if hasattr(value, "block_shape"):
        return MappedTensor(value)
    return None if value is None else lift(value)
