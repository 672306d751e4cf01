"""`flex_attention`: PyTorch's FlexAttention by this package's kernels. Its users change one import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import torch
from torch.compiler import is_compiling

from multiattn.api import fmha
from multiattn.meant import refuse_call, refuses_calls
from multiattn.operands import ScoreMod
from multiattn.told import warn_once
from multiattn.validate import check_inputs

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

    from multiattn.plan.backend import BackendName


@overload
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = ...,
    block_mask: BlockMask | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: Literal[False] = ...,
    kernel_options: dict[str, Any] | None = ...,
    *,
    return_aux: None = ...,
    backend: BackendName = ...,
) -> torch.Tensor: ...


@overload
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = ...,
    block_mask: BlockMask | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    return_lse: Literal[True],
    kernel_options: dict[str, Any] | None = ...,
    return_aux: None = ...,
    backend: BackendName = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = ...,
    block_mask: BlockMask | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: bool = ...,
    kernel_options: dict[str, Any] | None = ...,
    *,
    return_aux: None = ...,
    backend: BackendName = ...,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


@overload
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = ...,
    block_mask: BlockMask | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: Literal[False] = ...,
    kernel_options: dict[str, Any] | None = ...,
    *,
    return_aux: AuxRequest,
    backend: BackendName = ...,
) -> tuple[torch.Tensor, AuxOutput]: ...


@refuses_calls
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *extra: NoReturn,
    return_aux: AuxRequest | None = None,
    backend: BackendName = "auto",
    **unknown: NoReturn,
) -> Any:
    """`torch.nn.attention.flex_attention.flex_attention`, with a `backend` as in `multiattn.fmha`.

    Args:
        query: ``[B, Hq, Sq, D]``, fp16 or bf16.
        key: ``[B, Hkv, Skv, D]``, same dtype as query. With `enable_gqa` Hq may be a multiple of Hkv.
        value: ``[B, Hkv, Skv, Dv]``, same dtype as key. Dv need not be D.
        score_mod, block_mask, scale: As for `multiattn.fmha`.
        enable_gqa: Let query heads share key/value heads.
        return_lse: Also return the log-sum-exp, fp32 ``[B, Hq, Sq]``.
        kernel_options: Ignored, with one warning, because rules choose the tiles here.
        return_aux: The further results to return, in an `AuxOutput`. max_scores is not available.
        backend: One of `multiattn.backends()`, ``"reference"`` or ``"auto"``.

    Returns:
        The output; with `return_lse` (out, lse), with `return_aux` (out, AuxOutput).

    Raises:
        ValueError: For heads that differ without `enable_gqa`, and as `multiattn.fmha`.
    """
    if unknown or extra or value is None:
        refuse_call(flex_attention, extra, unknown, query=query, key=key, value=value)
    if not is_compiling():  # what is compiled is checked by the op
        check_inputs(query, key, value, strides=False)
    if not enable_gqa and query.shape[1] != key.shape[1]:
        heads = f"Hq={query.shape[1]}, Hkv={key.shape[1]}"
        raise ValueError(f"enable_gqa: got False with {heads}; allowed True, or as many heads of key; set it")
    if kernel_options:
        warn_once("flex_attention: kernel_options are ignored: rules choose the tiles here, and explain() says which")
    if return_aux is not None and (return_lse or getattr(return_aux, "max_scores", True)):
        got = "return_lse beside it" if return_lse else repr(return_aux)
        raise ValueError(f"return_aux: got {got}; allowed AuxRequest(lse=...) alone, whose max_scores is False")
    out, lse = fmha(
        query, key, value, scale=scale, score_mod=score_mod, block_mask=block_mask, backend=backend, return_lse=True
    )
    if return_aux is None:
        return (out, lse) if return_lse else out
    from torch.nn.attention.flex_attention import AuxOutput  # imports SymPy

    return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=None)
