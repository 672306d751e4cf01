"""The launch that multiattn makes of an emitted kernel for a problem, and a digest of many such launches.

How a kernel takes its arguments stands in no cubin: another version of multiattn could hand it the wrong ones. So a
manifest has a digest of launches for several problems, which must come out the same where the kernel is loaded.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from multiattn.plan import abi
from multiattn.plan import backend as registry
from multiattn.plan.backend import Plan, find_variant, plan_variant
from multiattn.problem import Problem

_SIZES = ("batch", "heads_q", "seq_q", "seq_kv", "strides_q", "strides_k", "strides_v")


def bind(plan: Plan, problem: Problem, image: abi.Image, constants: Mapping[str, str]) -> abi.Binding:
    """The launch of `plan`'s kernel for a problem; ValueError with every reason why its code does not hold for it.

    Args:
        plan: what the kernel was compiled for.
        problem: of the tensors at hand.
        image: of the kernel.
        constants: what its code is specialised on.
    """
    backend = registry.get(plan.backend)
    found = plan_variant(backend, find_variant(backend, plan.variant), problem, plan.arch, plan.config)
    if not isinstance(found, Plan):
        raise ValueError("; ".join(map(str, found)))
    binding: abi.Binding = importlib.import_module(f"multiattn.{plan.backend}.bind").bind(found, image, constants)
    names = dict.fromkeys((*constants, *binding.constants))
    pairs = ((name, binding.constants.get(name), constants.get(name)) for name in names)
    if wrong := [f"{name}: got {got}; allowed {allowed}" for name, got, allowed in pairs if got != allowed]:
        raise ValueError("; ".join(wrong))
    return binding


def launches_digest(plan: Plan, image: abi.Image, constants: Mapping[str, str]) -> str:
    """A digest of every byte that launches of a kernel hand to the driver, for its own problem and for others."""
    found = [_launch_bytes(plan, problem, image, constants) for problem in _problems(plan.problem)]
    return hashlib.sha256(b"".join(found)).hexdigest()


def _problems(problem: Problem) -> Iterator[Problem]:
    """The problem itself, then longer and shorter sequences, more heads and more batch entries, another scale."""
    yield problem
    for batch, heads, seq_q, seq_kv in ((1, 1, 1, 1), (3, 2, 1000, 333), (2, 1, 256, 4096), (16, 4, 4096, 4096)):
        kept = {name: getattr(problem, name) for name in ("heads_kv", "head_dim", "head_dim_v", "dtype", "v_in_k")}
        plain = Problem.contiguous(batch=batch, heads_q=heads * problem.heads_q, seq_q=seq_q, seq_kv=seq_kv, **kept)
        changed: dict[str, Any] = {name: getattr(plain, name) for name in _SIZES}
        yield replace(problem, scale=2 * problem.scale, **changed)


def _launch_bytes(plan: Plan, problem: Problem, image: abi.Image, constants: Mapping[str, str]) -> bytes:
    try:
        binding = bind(plan, problem, image, constants)
    except ValueError:  # its code does not hold for this one
        return b"refused"
    addresses = {name: int.from_bytes(_sha256(name.encode())[:7], "little") for name in abi.names_of(binding)}
    packed = [abi.pack(argument, addresses, _tensor_map_bytes) for argument in binding.arguments]
    return repr((packed, binding.grid, binding.image, binding.workspace_bytes)).encode()


def _tensor_map_bytes(tensor_map: abi.TensorMap, address: int) -> bytes:
    return _sha256(repr((tensor_map, address)).encode()) * (abi.TENSOR_MAP_BYTES // 32)


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
