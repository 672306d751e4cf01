"""Checks of packed batches and caches: their tensors, their lengths, and where a caller wants the results."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from multiattn.layout import DTYPE_NAMES, STORED_NAMES
from multiattn.plain import plain
from multiattn.sequences import CU_SEQLENS, SPLITS_MAX, Indices
from multiattn.validate import check_operand, check_sinks, not_a_tensor

SHOWN_STARTS = 16
"""The most values of a cu_seqlens that an error shows."""

_MADE_OF_LENGTHS = "it is torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()"
_OF_EACH = {
    "seqlens_kv": "give a number for each sequence",
    "page_table": "give a row of pages for each sequence",
    "cu_seqlens_q": _MADE_OF_LENGTHS,
    "cu_seqlens_kv": _MADE_OF_LENGTHS,
}


def check_packing(tensors: Sequence[Any], cu_seqlens: Sequence[Any], longest: Sequence[object]) -> None:
    """TypeError or ValueError for q, k and v that are no packed batch with these starts; no value of one is read."""
    for name, tensor in zip("qkv", tensors, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise not_a_tensor(name, tensor)
        if tensor.ndim != 3:
            got = f"rank {tensor.ndim} (shape {tuple(tensor.shape)})"
            hint = "a padded batch goes to fmha, or with a mask of its keys to integrations.padding.fmha_padded"
            raise ValueError(f"{name} must have rank 3, [T, H, D], in a packed batch; got {got}; {hint}")
    device = tensors[0].device
    for name, tensor in zip(CU_SEQLENS, cu_seqlens, strict=True):
        _check_index(name, tensor, device, "[B + 1], for B sequences")
    if cu_seqlens[0].shape != cu_seqlens[1].shape:
        shapes = {name: tuple(tensor.shape) for name, tensor in zip(CU_SEQLENS, cu_seqlens, strict=True)}
        hint = "a sequence without rows repeats its start"
        raise ValueError(f"cu_seqlens_q and cu_seqlens_kv must have one shape, [B + 1]; got {shapes}; {hint}")
    for name, given in zip(("max_seqlen_q", "max_seqlen_kv"), longest, strict=True):
        length = plain(given)
        if isinstance(length, bool) or not isinstance(length, int | torch.SymInt):
            is_tensor = isinstance(length, torch.Tensor)
            hint = f"{name}.item() is one" if is_tensor else "it is the length of the longest sequence"
            raise TypeError(f"{name} must be an int; got {type(length).__name__}; {hint}")
        if not isinstance(length, torch.SymInt) and length < 0:
            raise ValueError(f"{name}: got {length}; allowed 0 and more; it is the longest sequence's length")


def check_lengths(
    rows: tuple[int, int], cu_seqlens: tuple[torch.Tensor, torch.Tensor], longest: tuple[int | None, int | None]
) -> None:
    """ValueError for values of cu_seqlens that are no starts of sequences in so many rows of q, and of k and v.

    It reads them: on a GPU that waits for the device. A longest sequence of None is not checked.
    """
    sides = zip(("q", "kv"), cu_seqlens, rows, ("q", "k and v"), longest, strict=True)
    for side, starts, its_rows, of, most in sides:
        check_starts(side, starts.tolist(), its_rows, of, most)


def check_starts(side: str, starts: Sequence[int], rows: int, of: str, longest: int | None) -> None:
    """ValueError for values of one cu_seqlens that are no starts of sequences, or of sequences over the `longest`."""
    lengths = list(map(operator.sub, starts[1:], starts))
    least, most = min(lengths, default=0), max(lengths, default=0)
    if starts[0] == 0 and least >= 0 and starts[-1] <= rows and (longest is None or most <= longest):
        return
    if starts[0] == 0 and least >= 0 and starts[-1] <= rows:
        sequence = f"sequence {lengths.index(most)} of cu_seqlens_{side} has {most} rows"
        raise ValueError(f"max_seqlen_{side}: got {longest}; allowed {most} and more, as {sequence}")
    if starts[0]:
        got = f"{starts[0]} first"
    elif least < 0:
        place = next(place for place, it in enumerate(lengths) if it < 0)
        got = f"{starts[place + 1]} at {place + 1}, behind {starts[place]}"
    else:
        got = f"{starts[-1]} last"
    shown = ", ".join(map(str, starts[:SHOWN_STARTS])) + (", ..." if len(starts) > SHOWN_STARTS else "")
    raise ValueError(
        f"cu_seqlens_{side}: got {got}, in [{shown}]; allowed 0 first, none below the one before it, and up to {rows}, "
        f"the rows of {of}, [T, H, D]: torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)) makes "
        "them of lengths"
    )


def check_cache(
    q: object,
    k_cache: object,
    v_cache: object,
    where: Indices,
    sinks: torch.Tensor | None,
    *,
    strides: bool = True,
) -> None:
    """TypeError or ValueError for tensors that are no cache and its queries; no value of a tensor is read.

    Without `strides` those are not asked, as by `multiattn.validate.check_inputs`.
    """
    page_table, cu_seqlens_q = where.page_table, where.cu_seqlens_q
    tensors: dict[str, torch.Tensor] = {}
    ranks = {"q": "[B, Hq, Sq, D]" if cu_seqlens_q is None else "[T, Hq, D]"}
    rank_of_cache = "[B, Hkv, S, D]" if page_table is None else "[pages, Hkv, page, D]"
    ranks |= dict.fromkeys(("k_cache", "v_cache"), rank_of_cache)
    for (name, shape), given in zip(ranks.items(), (q, k_cache, v_cache), strict=True):
        if name != "q" and isinstance(given, torch.Tensor) and given.dtype == torch.uint8:
            hint = "bytes of fp8 are .view(torch.float8_e4m3fn)"
            raise TypeError(f"{name}.dtype: got torch.uint8; allowed the dtype of q, and 8-bit numbers; {hint}")
        tensor = check_operand(name, given, DTYPE_NAMES if name == "q" else {**DTYPE_NAMES, **STORED_NAMES})
        if tensor.ndim != shape.count(",") + 1:
            hint = _of_rank(name, tensor.ndim, cu_seqlens_q)
            raise ValueError(f"{name} must be {shape}; got shape {tuple(tensor.shape)}; {hint}")
        if strides and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            got = f"{tuple(tensor.stride())}; call .contiguous() on it"
            raise ValueError(f"{name} must have unit stride on D; got strides {got}")
        tensors[name] = tensor
    q, k, v = tensors.values()
    _check_alike(q, k, v)
    batch = q.shape[0] if cu_seqlens_q is None else None
    index = functools.partial(_check_index, device=q.device, strides=strides)
    sequences = index("seqlens_kv", where.seqlens_kv, shape="[B]", size=batch).shape[0]
    if page_table is None:
        if k.shape[0] != sequences:
            raise ValueError(
                f"k_cache without a page_table must have an entry for each of {sequences} sequences; "
                f"got shape {tuple(k.shape)}; cut it to k_cache[:{sequences}], or give a page_table"
            )
    else:
        index("page_table", page_table, shape="[B, max_pages]", size=sequences)
    if cu_seqlens_q is not None:
        index("cu_seqlens_q", cu_seqlens_q, shape="[B + 1]", size=sequences + 1)
    if sinks is not None:
        check_sinks(sinks, q)


def check_values(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    where: Indices,
    max_seqlen_q: int | None,
    left: int | None = None,
) -> None:
    """ValueError for lengths, pages or starts of queries that this cache and these queries ``[T, Hq, D]`` do not have.

    It reads them: on a GPU that waits for the device. Pages before a window that goes `left` back are nobody's.
    """
    seqlens_kv, page_table, cu_seqlens_q = where.seqlens_kv, where.page_table, where.cu_seqlens_q
    assert seqlens_kv is not None
    entries, _, rows, _ = k_cache.shape
    room = rows if page_table is None else rows * page_table.shape[1]
    wrong = (seqlens_kv < 0) | (seqlens_kv > room)
    if wrong.any():
        sequence = int(wrong.nonzero()[0])
        got = f"{int(seqlens_kv[sequence])} of sequence {sequence}"
        hint = "write the new keys into the cache first, and count them"
        raise ValueError(f"seqlens_kv: got {got}; allowed 0 to {room}, as many as there is room for; {hint}")
    if page_table is not None and page_table.shape[1]:
        first_key = torch.arange(page_table.shape[1], device=q.device) * rows
        used = first_key < seqlens_kv[:, None]
        if left is not None:
            counts = q.shape[2] if cu_seqlens_q is None else cu_seqlens_q.diff()
            used &= first_key + rows > (seqlens_kv.long() - counts - left)[:, None]
        wrong = used & ((page_table < 0) | (page_table >= entries))
        if wrong.any():
            sequence, place = wrong.nonzero()[0].tolist()
            got = f"{int(page_table[sequence, place])} of sequence {sequence} at {place}"
            allowed = f"0 to {entries - 1}, as there are {entries} pages"
            raise ValueError(f"page_table: got {got}; allowed {allowed}; name a page there, or lower seqlens_kv")
    if cu_seqlens_q is not None:
        check_starts("q", cu_seqlens_q.tolist(), q.shape[0], "q", max_seqlen_q)


def _of_rank(name: str, rank: int, cu_seqlens_q: object) -> str:
    """Advice on a tensor of a rank that it does not have here."""
    if name != "q":
        return f"one head is {name}.unsqueeze(1)" if rank == 3 else f"a layer of a cache is {name}[layer]"
    if cu_seqlens_q is not None:
        return "leave cu_seqlens_q out for queries [B, Hq, Sq, D]"
    return "one query of each sequence is q.unsqueeze(2)" if rank == 3 else "packed queries have cu_seqlens_q"


def _check_alike(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """TypeError or ValueError for dtypes, devices and shapes that are not of one call."""
    if k.dtype != v.dtype or q.dtype != (q.dtype if k.dtype in STORED_NAMES else k.dtype):
        got = f"{q.dtype}, {k.dtype}, {v.dtype}; convert q by .to(k_cache.dtype), or a cache by quantize_cache"
        raise TypeError(f"q, k_cache and v_cache must share one dtype, or both caches be of 8 bits; got {got}")
    if not q.device == k.device == v.device:
        got = f"{q.device}, {k.device}, {v.device}; move q by .to(k_cache.device)"
        raise ValueError(f"q, k_cache and v_cache must be on one device; got {got}")
    if q.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"device: got {q.device}; allowed cpu, cuda and meta; move the tensors by .cuda() or .cpu()")
    if k.shape[:-1] != v.shape[:-1]:
        got = f"{_shapes(q, k, v)}; cut both to the same entries"
        raise ValueError(f"k_cache and v_cache must have one shape but for the last dimension; got {got}")
    heads_q, heads_kv, head_dim = q.shape[1], k.shape[1], q.shape[-1]
    if k.shape[-1] != head_dim:
        got = f"{_shapes(q, k, v)}; pad q with zeros, and give scale"
        raise ValueError(f"q and k_cache must share head_dim; got {got}")
    if min(head_dim, v.shape[-1], heads_q, heads_kv) < 1:
        raise ValueError(f"heads and head_dim must be at least 1; got {_shapes(q, k, v)}")
    if heads_q % heads_kv:
        got = f"{_shapes(q, k, v)}; a cache [.., S, Hkv, D] is given as a view, k_cache.transpose(1, 2)"
        raise ValueError(f"query heads must be a multiple of key/value heads (GQA); got {got}")


def _shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    return f"q={tuple(q.shape)}, k_cache={tuple(k.shape)}, v_cache={tuple(v.shape)}"


def check_numbers(max_seqlen_q: object, num_splits: object, *, is_packed: bool) -> None:
    """TypeError or ValueError for numbers that are none of a call with a cache."""
    if is_packed and max_seqlen_q is None:
        raise TypeError("max_seqlen_q must be an int with cu_seqlens_q; got None; give the most queries of a sequence")
    if not is_packed and max_seqlen_q is not None:
        hint = "leave it out, or give packed queries with cu_seqlens_q"
        raise TypeError(f"max_seqlen_q: got {max_seqlen_q!r}; allowed None without cu_seqlens_q; {hint}")
    for name, number, least, most in (
        ("max_seqlen_q", max_seqlen_q, 0, None),
        ("num_splits", num_splits, 1, SPLITS_MAX),
    ):
        if number is None or isinstance(number, torch.SymInt):
            continue
        if isinstance(number, bool) or not isinstance(number, int):
            hint = f"; {name}.item() is one" if isinstance(number, torch.Tensor) else ""
            raise TypeError(f"{name} must be an int or None; got {type(number).__name__}{hint}")
        if number < least or (most is not None and number > most):
            allowed = f"{least} and more" if most is None else f"{least} to {most}, or None"
            hint = "; None leaves it to the plan" if name == "num_splits" else ""
            raise ValueError(f"{name}: got {number}; allowed {allowed}{hint}")


def _check_index(
    name: str, tensor: object, device: torch.device, shape: str, size: int | None = None, *, strides: bool = False
) -> torch.Tensor:
    """An int32 tensor of this shape on the device, its first dimension of `size`; TypeError or ValueError for another.

    With `strides` its last dimension must have unit stride.
    """
    if not isinstance(tensor, torch.Tensor):
        raise not_a_tensor(name, tensor)
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name}.dtype: got {tensor.dtype}; allowed torch.int32; call .int() on it")
    rank, least = 1 + (name == "page_table"), int(name.startswith("cu_seqlens"))
    if tensor.ndim != rank or tensor.shape[0] < least or (size is not None and tensor.shape[0] != size):
        allowed = shape if size is None else f"{shape}, the first dimension {size}"
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}; allowed {allowed}; {_OF_EACH[name]}")
    if strides and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        got = f"{tuple(tensor.stride())}; call .contiguous() on it"
        raise ValueError(f"{name} must have unit stride on its last dimension; got strides {got}")
    if tensor.device != device:
        got = f"{tensor.device}; move it by .to(q.device)"
        raise ValueError(f"{name} must be on the device of q, {device}; got {got}")
    return tensor
