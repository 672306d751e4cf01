"""Packed batches: `fmha_varlen` and its backward. Sequences of any lengths, one after another, without padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, overload

import torch
from torch.compiler import is_compiling

from multiattn.meant import refuse_call
from multiattn.operands import Operands, Options, with_score
from multiattn.packed import as_batch_of_one, of_batch_of_one
from multiattn.plain import plain
from multiattn.run import compat, values
from multiattn.run.autograd import attend, attend_with_max, autocast, differentiate
from multiattn.sequences import Batching
from multiattn.signatures import PackedOptions, names_of, settled, takes
from multiattn.validate import not_a_tensor
from multiattn.validate.sequences import check_lengths, check_packing

if TYPE_CHECKING:
    from typing_extensions import Unpack

_NAMES = names_of(PackedOptions)
_PACKED = Batching("packed")


@overload
def fmha_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_max: Literal[False] = ...,
    **options: Unpack[PackedOptions],
) -> torch.Tensor: ...


@overload
def fmha_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[True],
    return_max: Literal[False] = ...,
    **options: Unpack[PackedOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def fmha_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: bool,
    return_max: Literal[False] = ...,
    **options: Unpack[PackedOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


@overload
def fmha_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_max: Literal[True],
    **options: Unpack[PackedOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def fmha_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[True],
    return_max: Literal[True],
    **options: Unpack[PackedOptions],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


@overload
def fmha_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: bool = ...,
    return_max: bool,
    **options: Unpack[PackedOptions],
) -> torch.Tensor | tuple[torch.Tensor, ...]: ...


@takes(PackedOptions)
def fmha_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *extra: NoReturn,
    return_lse: bool = False,
    return_max: bool = False,
    **options: Unpack[PackedOptions],
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Fused attention of B sequences that are packed one after another, each by itself; differentiable once.

    Every sequence has its own mask, aligned at its own bottom right, and its own positions i and j, which start at 0.

    Args:
        q: ``[Tq, Hq, D]``, fp16 or bf16, any strides with unit stride on D.
        k: ``[Tkv, Hkv, D]`` with ``Hq % Hkv == 0`` (GQA, MQA). Same dtype and device as q.
        v: ``[Tkv, Hkv, Dv]``, same dtype and device as k. Dv need not be D.
        cu_seqlens_q: int32 ``[B + 1]`` on the device of q. Sequence b has the rows ``cu_seqlens_q[b]`` to
            ``cu_seqlens_q[b + 1]`` of q. The values start with 0, never fall, and end with Tq or before; a sequence may
            be empty. On a CPU they are checked. On a GPU only the device reads them, so they may change under a CUDA
            graph, and wrong ones give undefined results; ``MULTIATTN_CHECK=1`` has them checked there, too.
        cu_seqlens_kv: The same for k and v, with as many sequences.
        max_seqlen_q: At least the length of the longest sequence of q, checked where cu_seqlens are. `bias` and
            `score_mod` are checked by it.
        max_seqlen_kv: The same for k and v.
        causal, window, scale, softcap, score_mod, sinks: As for `multiattn.fmha`.
        variant, return_lse, return_max, deterministic: As for `multiattn.fmha`.
        alibi_slopes: fp32 ``[Hq]`` or ``[B, Hq]``.
        bias: ``[B|1, Hq|1, max_seqlen_q|1, max_seqlen_kv|1]``, otherwise as for `multiattn.fmha`. A bool one costs an
            element for each score here, as a number does.
        block_mask: FlexAttention's `BlockMask` over the packed axis, of one batch entry, Tq queries and Tkv keys: its
            `mask_mod` has the rows of q and k as positions, which those of `score_mod` are not. No sequence sees
            another, whatever it says; a key must pass the band of its sequence, too.
        dropout_p, dropout_seed: As for `multiattn.fmha`: nothing is dropped.
        backend: As for `multiattn.fmha`.

    Returns:
        The output, ``[Tq, Hq, Dv]`` in the dtype of q, contiguous. With `return_lse` also lse, fp32 ``[Hq, Tq]``. A row
        that sees no key has ``out = 0`` and ``lse = -inf`` (with a sink: ``lse = sink``), and gives zero gradients. The
        same holds for rows of no sequence: ``Tq`` may be more than ``cu_seqlens_q[-1]``. With `return_max` also the
        largest score of each row, fp32 ``[Hq, Tq]``, last.

    Raises:
        TypeError, ValueError: An input is wrong for every backend.
        Unsupported: The backend cannot run this problem here; `.reasons` says why.
    """
    lengths = Lengths.of(options)
    if extra or v is None or lengths.lacks_any or not _NAMES.issuperset(options):
        refuse_call(fmha_varlen, extra, options, q=q, k=k, v=v, **lengths._asdict())
    if compat.autocast_active():
        q, k, v = autocast(q, k, v)
    if return_max:
        out, *sums, row_max = attend_with_max(*packed_call(q, k, v, options, lengths))
        return (of_batch_of_one(out), *(it.squeeze(0) for it in (*sums * return_lse, row_max)))
    out, lse = attend(*packed_call(q, k, v, options, lengths))
    packed = of_batch_of_one(out)
    return (packed, lse.squeeze(0)) if return_lse else packed


@takes(PackedOptions)
def fmha_varlen_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    *extra: NoReturn,
    dlse: torch.Tensor | None = None,
    **options: Unpack[PackedOptions],
) -> tuple[torch.Tensor, ...]:
    """The gradient of `fmha_varlen` from the results of a forward, for callers without autograd.

    Args:
        q, k, v, and all from cu_seqlens_q to max_seqlen_kv, causal to dropout_seed: As in the call of `fmha_varlen`.
        out: The output of a forward of any backend, ``[Tq, Hq, Dv]``.
        lse: The log-sum-exp of the same forward, fp32 ``[Hq, Tq]``.
        dout: The gradient of out, like it.
        dlse: The gradient of lse, like it. None if nothing depends on lse.
        backend, variant, deterministic: As for `multiattn.fmha_backward`.

    Returns:
        dq, dk and dv, contiguous ``[T, H, D]``. With sinks, dsinks follows; then come the gradients of captured
        tensors, as in `multiattn.fmha_backward`.

    Raises:
        TypeError, ValueError, Unsupported: As for `fmha_varlen`.
    """
    lengths = Lengths.of(options)
    if extra or dout is None or lengths.lacks_any or not _NAMES.issuperset(options):
        given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout}
        refuse_call(fmha_varlen_backward, extra, options, **given, **lengths._asdict())
    for name, tensor in (("out", out), ("lse", lse), ("dout", dout)):
        if not isinstance(tensor, torch.Tensor):
            raise not_a_tensor(name, tensor)
    with torch.enable_grad():  # who asks for a gradient is a matter of tensors here
        operands, asked = packed_call(q, k, v, options, lengths, dout)
    operands = operands._replace(
        out=as_batch_of_one(out),
        lse=lse.unsqueeze(0),
        dlse=None if dlse is None else dlse.unsqueeze(0),
    )
    dq, dk, dv, *others = differentiate(operands, asked)
    assert dq is not None
    assert dk is not None
    assert dv is not None
    return (*map(of_batch_of_one, (dq, dk, dv)), *(it for it in others if it is not None))


class Lengths(NamedTuple):
    """The lengths of a call's sequences, as its caller gives them."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    max_seqlen_q: int
    max_seqlen_kv: int

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Lengths:
        """Those among the options of a call; None for what it leaves out."""
        given: Callable[[str], Any] = options.get
        return cls(given("cu_seqlens_q"), given("cu_seqlens_kv"), given("max_seqlen_q"), given("max_seqlen_kv"))

    @property
    def starts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where sequences start, in q and in k."""
        return self.cu_seqlens_q, self.cu_seqlens_kv

    @property
    def longest(self) -> tuple[int, int]:
        """At least the length of the longest sequence of q, and of k."""
        return self.max_seqlen_q, self.max_seqlen_kv

    @property
    def lacks_any(self) -> bool:
        """True where a call left one out; no value is compared, as some may be traced."""
        q, kv, max_q, max_kv = self
        return q is None or kv is None or max_q is None or max_kv is None


def packed_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Mapping[str, Any],
    lengths: Lengths,
    dout: torch.Tensor | None = None,
) -> tuple[Operands, Options]:
    """The operands and options of a call of `fmha_varlen`, or with `dout` of its gradient.

    TypeError or ValueError, naming what came.
    """
    asked, scores = settled(options)
    operands = pack(q, k, v, lengths, options.get("sinks"))
    if dout is not None:
        operands = operands._replace(dout=as_batch_of_one(dout))
    return with_packing(operands, asked, lengths, *scores)


def pack(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Lengths,
    sinks: torch.Tensor | None = None,
) -> Operands:
    """q, k, v and sinks of a packed batch as operands. TypeError or ValueError, naming what came."""
    if not is_compiling():  # else checked when the op is called
        starts, longest = lengths.starts, lengths.longest
        check_packing((q, k, v), starts, longest)
        if values.can_be_read(*starts):
            check_lengths((q.shape[0], k.shape[0]), starts, longest)
    return Operands(as_batch_of_one(q), as_batch_of_one(k), as_batch_of_one(v), sinks=sinks)


def with_packing(
    operands: Operands,
    options: Options,
    lengths: Lengths,
    *scores: Any,
) -> tuple[Operands, Options]:
    """The operands and options with the packing that a call asks for, and its `signatures.Scores`."""
    batching, starts = _PACKED, (lengths.cu_seqlens_q.contiguous(), lengths.cu_seqlens_kv.contiguous())
    if not all(it is None for it in scores):
        longest = [plain(it) for it in lengths.longest]
        batching = Batching("packed", *longest)
        of_scores = (lengths.cu_seqlens_q.shape[0] - 1, *longest)
        operands, options = with_score(operands, options, *scores, lengths=of_scores, starts=starts)
    indices = operands.indices._replace(cu_seqlens_q=starts[0], cu_seqlens_kv=starts[1])
    return operands._replace(indices=indices), options._replace(batching=batching)
