"""`fmha_padded` runs a padded batch as a packed one. It takes a mask of keys ``[B, Skv]``, as tokenizers give it.

Tokens move to the front of a packed batch of the same size, ``[B * S]``, so every shape is known before the mask is.
Nothing waits for the device, and one graph or compiled function serves every mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch.compiler import is_compiling

from multiattn.api import fmha
from multiattn.layout import unit_stride
from multiattn.meant import refuse_call
from multiattn.run.autograd import is_transformed
from multiattn.signatures import PaddedOptions, names_of, takes
from multiattn.validate import not_a_tensor
from multiattn.varlen import fmha_varlen

if TYPE_CHECKING:
    from typing_extensions import Unpack

_NAMES = names_of(PaddedOptions)

_ABSENT: Any = ...  # None is a mask, too: that of a batch without padding

# No overload fits options in a dict.
dense: Callable[..., torch.Tensor] = fmha
packed: Callable[..., torch.Tensor] = fmha_varlen


@takes(PaddedOptions, absent=_ABSENT)
def fmha_padded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *extra: NoReturn,
    kv_mask: torch.Tensor | None,
    **options: Unpack[PaddedOptions],
) -> torch.Tensor:
    """Fused attention of a batch with padding at either end of each row; differentiable once.

    Args:
        q: ``[B, Hq, Sq, D]``, any strides. Where the call depends on positions, as with `causal`, `window` or
            `alibi_slopes`, the queries are the last Sq of the Skv positions. Otherwise they may be those of another
            sequence.
        k: ``[B, Hkv, Skv, D]``.
        v: ``[B, Hkv, Skv, Dv]``.
        kv_mask: ``[B, Skv]``, bool or integers: nonzero for a token, zero for padding, which no query sees. Tokens of a
            row count as neighbours, even with padding between them. None is a batch without padding.
        all others: As for `multiattn.fmha`.

    Returns:
        The output, ``[B, Hq, Sq, Dv]`` in the dtype of q. Rows that see no key are 0. A query that is padding itself
        sees the row's tokens where nothing depends on positions, or where Sq is 1. Otherwise its row is 0, and it gives
        zero gradients.

    Raises:
        TypeError, Unsupported: As `multiattn.fmha`, and for a `kv_mask` of floats.
        ValueError: As `multiattn.fmha`, for a `kv_mask` of another shape, and for more queries than keys where the call
            depends on positions.
    """
    if extra or kv_mask is _ABSENT or not _NAMES.issuperset(options):
        needed = {"q": q, "k": k, "v": v, "kv_mask": kv_mask}
        given = {name: None if it is _ABSENT else "given" for name, it in needed.items()}
        refuse_call(fmha_padded, extra, options, **given)
    if kv_mask is None:
        return dense(unit_stride(q), unit_stride(k), unit_stride(v), **options)
    _check_rank("q", q)
    _check_rank("k", k)
    _check_mask(kv_mask)
    (batch, _, seq_q, _), seq_kv = q.shape, k.shape[2]
    if tuple(kv_mask.shape) != (batch, seq_kv):
        allowed = f"{(batch, seq_kv)}, [B, Skv], or None; a mask of scores [B, 1, Sq, Skv] is bias of fmha"
        raise ValueError(f"kv_mask: got shape {tuple(kv_mask.shape)}; allowed {allowed}")
    kv_mask = kv_mask.to(torch.bool)
    if seq_q == 1:  # a packed copy of all keys would cost more than one query does
        q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
        return dense(q, k, v, bias=kv_mask[:, None, None], **options)
    keys = TokenPlaces.of(kv_mask)
    if options.get("causal") or options.get("window") is not None or options.get("alibi_slopes") is not None:
        if seq_q > seq_kv:
            raise ValueError(
                f"q: got Sq={seq_q} for Skv={seq_kv}; allowed Sq <= Skv, as queries are the last positions"
            )
        queries = keys if seq_q == seq_kv else TokenPlaces.of(kv_mask[:, seq_kv - seq_q :])
    else:
        queries = TokenPlaces.of(kv_mask.new_ones(1, 1).expand(batch, seq_q))
    pack, unpack = (_Pack.apply, _Unpack.apply) if is_compiling() or not is_transformed() else (_take, _put)
    rows = packed(
        *(pack(tensor, *places[:2]) for tensor, places in ((q, queries), (k, keys), (v, keys))),
        cu_seqlens_q=queries.cu_seqlens,
        cu_seqlens_kv=keys.cu_seqlens,
        max_seqlen_q=seq_q,
        max_seqlen_kv=seq_kv,
        **options,
    )
    return unpack(rows, *queries[:2], (batch, seq_q))


def _check_rank(name: str, tensor: object) -> None:
    """TypeError or ValueError for what is no ``[B, H, S, D]``, which the mask is held against."""
    if not isinstance(tensor, torch.Tensor):
        raise not_a_tensor(name, tensor)
    if tensor.ndim != 4:
        hint = f"one sequence is {name}.unsqueeze(0), packed rows go to fmha_varlen"
        raise ValueError(f"{name} must have rank 4, [B, H, S, D]; got shape {tuple(tensor.shape)}; {hint}")


def _check_mask(kv_mask: object) -> None:
    """TypeError for what is no mask of tokens: zeros of a mask that is added to scores would hide what they show."""
    if not isinstance(kv_mask, torch.Tensor):
        raise not_a_tensor("kv_mask", kv_mask, "a torch.Tensor or None")
    if kv_mask.is_floating_point() or kv_mask.is_complex():
        hint = "kv_mask.bool() where nonzero is a token, kv_mask == 0 of a mask that is added to scores"
        raise TypeError(f"kv_mask.dtype: got {kv_mask.dtype}; allowed torch.bool and integers; give {hint}")


class TokenPlaces(NamedTuple):
    """Where the tokens of a padded batch ``[B, S]`` go in a packed one ``[B * S]``, the padding behind them all."""

    sources: torch.Tensor
    """Int64 ``[B * S]``: which place of the flattened batch each packed row is from."""
    places: torch.Tensor
    """The inverse: the packed row of each place."""
    cu_seqlens: torch.Tensor
    """Int32 ``[B + 1]``."""

    @classmethod
    def of(cls, mask: torch.Tensor) -> TokenPlaces:
        """The places of a bool mask ``[B, S]``, true for tokens."""
        is_token = mask.reshape(-1)
        tokens = is_token.cumsum(0)  # up to here, this one included
        here = torch.arange(is_token.numel(), device=mask.device)
        places = torch.where(is_token, tokens - 1, tokens[-1:] + here - tokens)
        sources = torch.empty_like(places).scatter_(0, places, here)
        lengths = mask.sum(-1, dtype=torch.int32)
        return cls(sources, places, torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)))


def _take(padded: torch.Tensor, sources: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Rows ``[B * S, H, D]`` of ``[B, H, S, D]``, in one copy whatever its strides."""
    length = max(padded.shape[2], 1)
    return padded.transpose(1, 2)[sources // length, sources % length]


def _put(rows: torch.Tensor, sources: torch.Tensor, places: torch.Tensor, sizes: tuple[int, int]) -> torch.Tensor:
    """``[B, H, S, D]`` of rows, in memory ``[B, S, H, D]``; the inverse of `_take`. `sizes` are B and S."""
    return rows[places].view(*sizes, *rows.shape[1:]).transpose(1, 2)


class _Pack(torch.autograd.Function):
    """`_take`: its gradient moves rows back, where that of indexing would sort and add them.

    `torch.func` takes `_take` itself, as it cannot transform this.
    """

    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, sources: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(sources, places)
        ctx.sizes = padded.shape[0], padded.shape[2]
        return _take(padded, sources, places)

    @staticmethod
    def backward(ctx: Any, drows: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        sources, places = ctx.saved_tensors
        return _put(drows, sources, places, ctx.sizes), None, None


class _Unpack(torch.autograd.Function):
    """`_put`, and its gradient."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sources: torch.Tensor, places: torch.Tensor, sizes: tuple[int, int]
    ) -> torch.Tensor:
        ctx.save_for_backward(sources, places)
        return _put(rows, sources, places, sizes)

    @staticmethod
    def backward(ctx: Any, dpadded: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _take(dpadded, *ctx.saved_tensors), None, None, None
