"""A Plan's kernels compiled to run elsewhere, with Triton's own representations on demand.

How a forward kernel is launched is told in `multiattn.triton.bind` without Triton; here it is held against what Triton
made of the same call, so that an emitted kernel whose launch would differ is an error while it is emitted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from multiattn import abi
from multiattn.backend import Exported, Plan
from multiattn.problem import VECTOR_BYTES
from multiattn.triton.backward_launch import KernelCall
from multiattn.triton.bind import ONE, WHOLE, bind
from multiattn.triton.compile import calls_of, specialise
from multiattn.triton.launch import Call, MemoryStub

KINDS = ("ttir", "ttgir", "llir", "ptx")

_TENSOR_MAP_DTYPES = {6: 6, 10: 9}
"""Triton's numbers of fp16 and bf16, which are the hardware's, and CUtensorMapDataType's."""


def export_plan(plan: Plan, kinds: Sequence[str]) -> tuple[Exported, ...]:
    """Every kernel of a Plan, compiled afresh; of `kinds` it has `KINDS`. The compiler's own error passes through.

    ValueError where the Binding of a forward kernel is not what Triton would launch, or not what its cubin takes.
    """
    return tuple(_export(call, plan, kinds) for call in calls_of(plan))


def _export(call: Call | KernelCall, plan: Plan, kinds: Sequence[str]) -> Exported:
    begin = time.perf_counter()
    kernel = specialise(call, plan.arch)
    seconds = time.perf_counter() - begin
    cubin, name = kernel.asm["cubin"], kernel.metadata.name
    threads = 32 * kernel.metadata.num_warps  # all, those that the compiler adds to specialise warps included
    binding = None
    if isinstance(call, Call):
        image = abi.Image(threads=threads, dynamic_smem_bytes=kernel.metadata.shared, boxes=_boxes(kernel.metadata))
        binding = bind(plan, image)
        _prove(binding, call, kernel)
        abi.check(binding, abi.read_entry(cubin, name))
    return Exported(
        kernel=name,
        seconds=seconds,
        cubin=cubin,
        threads=threads,
        dynamic_smem_bytes=kernel.metadata.shared,
        texts={kind: kernel.asm[kind].encode() for kind in KINDS if kind in kinds},
        binding=binding,
    )


def _boxes(metadata: Any) -> tuple[abi.Box, ...]:
    """What the compiler decided of each tensor descriptor."""
    return tuple(
        abi.Box(
            extents=tuple(each["block_size"]),
            swizzle=each["swizzle"],
            dtype=_TENSOR_MAP_DTYPES[each["elem_type"]],
        )
        for each in metadata.tensordesc_meta or ()
    )


def _prove(binding: abi.Binding, call: Call, kernel: Any) -> None:
    """ValueError where a Binding is not what Triton's launcher would hand over for the same call."""
    metadata = kernel.metadata
    for name, usual in (("num_ctas", 1), ("launch_cooperative_grid", False), ("launch_pdl", False),
                        ("global_scratch_size", 0), ("profile_scratch_size", 0)):  # fmt: skip
        if (got := getattr(metadata, name, usual)) != usual:
            raise ValueError(f"{metadata.name}: {name}: got {got}; allowed {usual}, all that the loader can launch")
    stubs = {name: MemoryStub(dtype=torch.uint8) for name in ("q", "k", "v", "out", "lse")}
    names = {id(stub): name for name, stub in stubs.items()}
    boxes = iter(binding.image.boxes)
    theirs: list[abi.Argument] = []
    for name, value in zip(kernel.src.fn.arg_names, call.arguments(**stubs), strict=True):
        theirs += _expand(kernel.src.signature[name], value, names, boxes)
    theirs += [abi.Pointer(tensor=None), abi.Pointer(tensor=None)]
    if tuple(theirs) != binding.arguments:
        pairs = zip(theirs, binding.arguments, strict=False)
        different = next((f"got {mine}; Triton has {his}" for his, mine in pairs if his != mine), "of another number")
        raise ValueError(f"{metadata.name}: arguments: {different}")
    if binding.grid != (call.grid, 1, 1):
        raise ValueError(f"{metadata.name}: grid: got {binding.grid}; Triton has {call.grid}")
    _prove_constants(binding, call, kernel)


def _expand(kind: str, value: Any, names: dict[int, str], boxes: Any) -> list[abi.Argument]:
    """An argument as Triton's launcher hands it over, by its type in the compiled signature."""
    if kind == "constexpr":
        return []
    if kind.startswith("*"):
        return [abi.Pointer(tensor=names[id(value)])]
    if kind.startswith("tensordesc"):
        itemsize = 2
        strides = tuple(stride * itemsize for stride in value.strides[:-1])
        return [
            abi.TensorMap(tensor=names[id(value.base)], shape=tuple(value.shape), strides=strides, box=next(boxes)),
            *(abi.Number(kind="i32", value=extent) for extent in value.shape),
            *(abi.Number(kind="i64", value=stride) for stride in value.strides),
        ]
    numbers: dict[str, abi.Kind] = {"fp32": "f32", "i32": "i32", "i64": "i64"}
    return [abi.Number(kind=numbers[kind], value=value)]


def _prove_constants(binding: abi.Binding, call: Call, kernel: Any) -> None:
    """ValueError where Triton knows something of an argument that the constants do not tell, or the other way round."""
    constants, problem = binding.constants, call.problem
    names = kernel.src.fn.arg_names
    whole = {names[path[0]] for path, known in kernel.src.attrs.items() if ["tt.divisibility", 16] in known}
    told = {name for name, text in constants.items() if text.endswith(WHOLE)} | {"out", "lse"}
    if abi.divisor(constants["alignment"]) == VECTOR_BYTES:
        told |= {"q"} if call.step.descriptor else {"q", "k", "v"}
    if whole != told:
        raise ValueError(f"{kernel.metadata.name}: multiples of 16: got {sorted(told)}; Triton has {sorted(whole)}")
    fixed = {names[path[0]]: value for path, value in kernel.src.constants.items()}
    ours = {
        "CAUSAL": constants["causal"] == "True",
        "SCALE_SIGN": int(constants["scale_sign"]),
        "HEAD_DIM": int(constants["head_dim"]),
        "VECTOR": abi.divisor(constants["alignment"]) // problem.torch_dtype.itemsize,
        "WIDE": constants["wide"] == "True",
        **{name: 1 for name, text in constants.items() if text == ONE and name in names},
    }
    for name, value in ours.items():
        if fixed.get(name) != value:
            raise ValueError(f"{kernel.metadata.name}: {name}: got {value}; Triton has {fixed.get(name)}")
