"""FlashInfer's functions that merge attention states, by `multiattn.merge_all`. Its users change one import.

    from multiattn.integrations.flashinfer import merge_state

A state is attention over some of the keys: the output v ``[T, H, D]``, and s ``[T, H]``, the log to *base 2* of the
sum of exp of the scores. The results of `multiattn.fmha_varlen` give a state as out and ``lse.T * log2(e)``.

Signatures and results are those of FlashInfer (package flashinfer-python), except in four points:

- A row that sees no key, ``s = -inf``, counts for nothing whatever its v is. Merged only with rows like it, it gives
  ``v = 0`` and ``s = -inf``. FlashInfer's kernels give NaN there.
- Results are differentiable.
- v may be fp32 or fp64, too, and all tensors may have any strides, and be on any device.
- `merge_state_in_place` takes s only in fp32, because it could not write to another dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from multiattn.merging import merge_named
from multiattn.validate import not_a_tensor

LN_2 = math.log(2.0)


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`flashinfer.merge_state`: attention over two sets of keys, from attention over each.

    Args:
        v_a: ``[T, H, D]``, fp16, bf16, fp32 or fp64.
        s_a: ``[T, H]``, log to base 2; taken as fp32.
        v_b: Same shape, dtype and device as v_a.
        s_b: Same shape and device as s_a.

    Returns:
        v, like v_a, and s, fp32 ``[T, H]``, log to base 2.

    Raises:
        TypeError, ValueError: The tensors are not two states of the same queries; the message says what came.
    """
    return _merged({"v_a": v_a, "v_b": v_b}, {"s_a": s_a, "s_b": s_b})


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """`flashinfer.merge_state_in_place`: `merge_state` into its first state.

    Args:
        v: ``[T, H, D]``. It is written.
        s: fp32 ``[T, H]``, log to base 2. It is written.
        v_other: Same shape, dtype and device as v.
        s_other: Same shape and device as s.
        mask: ``[T]``, bool or numbers: rows where it is zero stay as they are. None merges all rows. Only the device
            reads its values, so they may change under a CUDA graph.

    Raises:
        TypeError, ValueError: As `merge_state`, and for an s that is not fp32 or a mask of another shape.
    """
    merged_v, merged_s = _merged({"v": v, "v_other": v_other}, {"s": s, "s_other": s_other})
    if s.dtype != torch.float32:
        allowed = "torch.float32, as the result is written there; call .float() on it"
        raise TypeError(f"s.dtype: got {s.dtype}; allowed {allowed}")
    if mask is not None:
        if tuple(mask.shape) != (v.shape[0],):
            raise ValueError(
                f"mask: got shape {list(mask.shape)}; allowed [{v.shape[0]}], one for each row; flatten it"
            )
        is_merged = mask.to(torch.bool)[:, None]
        merged_v = torch.where(is_merged[:, None], merged_v, v)
        merged_s = torch.where(is_merged, merged_s, s)
    v.copy_(merged_v)
    s.copy_(merged_s)


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`flashinfer.merge_states`: `merge_state` of any number N of states, rounded once.

    Args:
        v: ``[T, N, H, D]``, fp16, bf16, fp32 or fp64.
        s: ``[T, N, H]``, log to base 2; taken as fp32.

    Returns:
        v ``[T, H, D]`` and s, fp32 ``[T, H]``, log to base 2. Without states they are 0 and -inf.

    Raises:
        TypeError, ValueError: The tensors are not states; the message says what came.
    """
    _check_state("v", v, "s", s, 4, "[T, N, H, D]")
    if v.shape[1] == 0:
        rows = (v.shape[0], *v.shape[2:])
        return v.new_zeros(rows), s.new_full(rows[:2], -torch.inf, dtype=torch.float32)
    each = range(v.shape[1])
    return _merged({f"v[:, {at}]": v[:, at] for at in each}, {f"s[:, {at}]": s[:, at] for at in each})


def _merged(vs: Mapping[str, torch.Tensor], ss: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The merger of states, by the names of their tensors."""
    for (v_name, v), (s_name, s) in zip(vs.items(), ss.items(), strict=True):
        _check_state(v_name, v, s_name, s, 3, "[T, H, D]")
    (first, like), *others = vs.items()
    for name, v in others:
        if v.shape != like.shape:
            hint = "states have the same queries, and other keys"
            raise ValueError(f"{name}: got shape {list(v.shape)}; allowed {list(like.shape)}, that of {first}; {hint}")
    states = {name: s.to(torch.float32) for name, s in ss.items()}
    # Only differences change their base, so that one state alone, or beside empty ones, keeps the bits of its s.
    highest = torch.stack(list(states.values())).amax(dim=0).detach()
    highest = highest.masked_fill(highest.isinf(), 0.0)
    out, lse = merge_named(vs, {name: (s - highest).T * LN_2 for name, s in states.items()})
    return out, highest + lse.T / LN_2


def _check_state(v_name: str, v: torch.Tensor, s_name: str, s: torch.Tensor, rank: int, layout: str) -> None:
    """The shapes that would mean another thing once dimensions are swapped; `merge_named` checks all else."""
    for name, tensor in ((v_name, v), (s_name, s)):
        if not isinstance(tensor, torch.Tensor):
            raise not_a_tensor(name, tensor)
    if v.ndim != rank:
        hint = "multiattn.merge takes [B, Hq, Sq, D]"
        raise ValueError(f"{v_name} must have rank {rank}, {layout}; got shape {list(v.shape)}; {hint}")
    if s.shape != v.shape[:-1]:
        raise ValueError(
            f"{s_name}: got shape {list(s.shape)}; allowed {list(v.shape[:-1])}, a number for each row; transpose it"
        )
