"""Results of a good kernel for parity's cases, and what breaks them: the tester's tests judge both."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from multiattn.block_mask import BlockLists
from parity.case import Case
from parity.cases import CASES
from parity.launch import prepare_case
from parity.tensors import Inputs
from parity.tolerance import operands_and_problem, reference_in_chunks

CPU = torch.device("cpu")
BY_NAME = {case.name: case for case in CASES}

Result = tuple[torch.Tensor, torch.Tensor]
Break = Callable[[Case, Inputs], Result]


def options_of(case: Case, inputs: Inputs, **changes: Any) -> dict[str, Any]:
    """The options of a case's call, with changes."""
    named = {"causal": case.causal, "window": case.window, "scale": case.scale, "sinks": inputs.sinks}
    named |= {"score": inputs.score, "blocks": inputs.blocks, "packed": inputs.packed, "cached": inputs.cached}
    return named | changes


def attend(case: Case, inputs: Inputs, **changes: Any) -> Result:
    """A good kernel's result: fp32 inside, rounded once. `changes` to its options break it."""
    options = options_of(case, inputs, **changes)
    operands, problem = operands_and_problem(inputs.q, inputs.k, inputs.v, **options)
    out, lse = reference_in_chunks(operands, problem, torch.float32)
    return out.to(case.torch_dtype), lse


def other(**changes: Any) -> Break:
    """A result with other options."""
    return lambda case, inputs: attend(case, inputs, **changes)


def check(case: Case, result: Result) -> None:
    """Mismatch where a result is not within its case's tolerance."""
    _, truth = prepare_case(case, CPU)
    truth.out.check(result[0], "a plan")
    truth.lse.check(result[1], "a plan")


def then(change: Callable[[torch.Tensor, torch.Tensor], Result]) -> Break:
    """A right result, changed."""
    return lambda case, inputs: change(*attend(case, inputs))


def changed_lists(blocks: BlockLists, **changes: Callable[[torch.Tensor], torch.Tensor]) -> BlockLists:
    """The lists of a block mask, those that are named changed."""
    tensors = (changes[name](it) if name in changes else it for name, it in blocks.named.items())
    return blocks._replace(tensors=tuple(tensors))


def one_less(counts: torch.Tensor) -> torch.Tensor:
    """Counts of lists whose last entry is dropped."""
    return (counts - 1).clamp(min=0)


def of_head_before(blocks: BlockLists) -> BlockLists:
    """Each head with the lists of the one before it."""
    return blocks._replace(tensors=tuple(it.roll(1, dims=1) for it in blocks.tensors))


def of_row_before(blocks: BlockLists) -> BlockLists:
    """Each row with the lists of the one before it: of a packed batch it may be another sequence's."""
    return blocks._replace(tensors=tuple(it.roll(1, dims=2) for it in blocks.tensors))


def first_entries(blocks: BlockLists) -> BlockLists:
    """Lists with the first partial block of each row, and no full one."""
    return changed_lists(blocks, kv_num_blocks=lambda it: it.clamp(max=1), full_kv_num_blocks=torch.zeros_like)


def each(broken: Mapping[str, tuple[Any, str]]) -> list[tuple[str, str]]:
    """Names of breaks, each with the name of a case that must find it."""
    return [(name, case) for name, (_, cases) in broken.items() for case in cases.split()]


def rows_of_k(case: Case, inputs: Inputs) -> Result:
    """V with rows as far apart as those of K."""
    flat = inputs.v.flatten(2)
    places = torch.arange(case.seq_kv)[:, None] * case.head_dim + torch.arange(case.width_v)
    return attend(case, replace(inputs, v=flat[..., places % flat.shape[2]]))


def products_of_width_v(case: Case, inputs: Inputs) -> Result:
    """Q @ K of as many columns as V has."""
    q = inputs.q.clone()
    q[..., case.width_v :] = 0
    return attend(case, replace(inputs, q=q))


def columns_of_k(out: torch.Tensor, columns: int) -> torch.Tensor:
    """Out of no more columns than K has."""
    out[..., columns:] = 0
    return out


def half_again(out: torch.Tensor, lse: torch.Tensor) -> Result:
    """Out whose second half is the first, as two warpgroups with one half of V make it."""
    half = out.shape[-1] // 2
    out[..., half:] = out[..., :half].clone()
    return out, lse


def block_late(keys: int) -> Break:
    """Weights of each block times V of the next one, in the second half of columns: a twin that is a block ahead."""

    def broken(case: Case, inputs: Inputs) -> Result:
        v, half = inputs.v.clone(), case.width_v // 2
        v[..., half:] = torch.nn.functional.pad(inputs.v[:, :, keys:, half:], (0, 0, 0, keys))
        return attend(case, replace(inputs, v=v))

    return broken


WIDTHS: dict[str, tuple[Break, str]] = {
    "v by the rows of k": (rows_of_k, "d192_v128_full d64_v128_causal d40_v72_full d128_v64_bshd d8_v256_full"),
    "products as wide as v": (products_of_width_v, "d192_v128_full d128_v64_causal d72_v40_full d576_v512_causal"),
    "scaled by the width of v": (
        lambda case, inputs: attend(case, inputs, scale=case.width_v**-0.5), "d192_v128_causal d64_v128_full",
    ),
    "out as wide as k": (
        lambda case, inputs: (columns_of_k((found := attend(case, inputs))[0], case.head_dim), found[1]),
        "d64_v128_full d40_v72_causal d8_v256_causal",
    ),
    "half of v twice": (then(half_again), "d192_v128_full d64_v128_causal d320_v256_causal d576_v512_causal"),
    "weights a block late": (block_late(64), "d192_v128_full d256_v128_causal d512_v256_causal d576_v512_causal"),
}  # fmt: skip
"""Results of kernels that take the width of v for that of k, or that share out the columns of v wrongly."""

LISTED = "blocks_of_64_by_head blocks_of_128_by_head"
"""Cases with lists of each head, of partial and of full blocks."""

WINDOWS = {
    (1, 0): "window_0_0 window_7_3 window_64_0 window_130_causal window_left_only window_d128_bf16 window_30_0_113x203",
    (-1, 0): "window_1_0 window_7_3 window_64_0 window_130_causal window_left_only window_50_0_1x300",
    (0, 1): "window_0_0 window_7_3 window_64_0 window_right_only window_30_2_203x113 window_1_1_300x3",
    (0, -1): "window_7_3 window_63_64 window_right_only window_30_2_203x113 window_1_1_300x3 window_d40_fp16",
}
"""By how many more keys on either side, cases that must find a window that has them."""


def moved_bounds(case: Case, left: int, right: int) -> tuple[int | None, ...]:
    """The bounds of a case's window, each by so much elsewhere."""
    bounds = zip(case.window or (), (left, right), strict=True)
    return tuple(None if bound is None else max(bound + more, 0) for bound, more in bounds)
