"""Caches of keys and values: lengths that stay on the device, and pages that a table names.

A cache has room for more keys than a sequence has. How many each sequence has is ``seqlens_kv``, int32 ``[B]`` on the
device, which no host reads: one CUDA graph serves every step of a generation. Without a table the keys of sequence b
are entry b of ``[B, Hkv, S, D]``. With ``page_table``, int32 ``[B, max_pages]``, the cache is ``[pages, Hkv, page,
D]``: key j of sequence b is row ``j % page`` of page ``page_table[b, j // page]``. An entry of the table whose keys
are all beyond the sequence's length, or before all windows, is never read, nor is a row of a page there.

Inside this package k and v of a call are the caches as they are given, and queries that are packed, ``[T, Hq, D]``,
are a batch of one, as `multiattn.packed` has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from multiattn.layout import VECTOR_BYTES, Layout, Shape, Strides, row_major
from multiattn.packed import check_starts
from multiattn.validate import check_operand, check_sinks, not_a_tensor

SPLITS_MAX = 256
"""The most parts that the keys of a sequence are divided into, as in FlashAttention-3."""

CACHE_TENSORS = ("seqlens_kv", "page_table", "cu_seqlens_q")
"""The tensors that say where keys and queries are."""

_OF_EACH = {
    "seqlens_kv": "give a number for each sequence",
    "page_table": "give a row of pages for each sequence",
    "cu_seqlens_q": "it is torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()",
}

PARTIAL = ("partial_out", "partial_lse")
"""Areas of workspace: `area_layouts` says what is where."""


class Cache(NamedTuple):
    """A call's cache, beside its tensors."""

    is_paged: bool = False
    max_q: int | None = None
    """Queries that are packed: the most of one sequence. None: they are ``[B, Hq, Sq, D]``."""
    splits: int | None = None
    """The parts that the caller has the keys divided into; None leaves it to the plan."""
    strides_out: Strides | None = None
    """Strides (B, H, S) of the caller's own out; None: results are laid out like q."""

    @property
    def names(self) -> tuple[str, ...]:
        """The `CACHE_TENSORS` that it has."""
        has = {"seqlens_kv": True, "page_table": self.is_paged, "cu_seqlens_q": self.max_q is not None}
        return tuple(name for name in CACHE_TENSORS if has[name])


class CacheSpec(NamedTuple):
    """The cache of a problem. `Problem.seq_kv` is the most keys that a sequence may have."""

    sequences: int
    entries: int
    """The first dimension of k and v: batch entries, or pages."""
    page: int | None = None
    """Keys of a page; None: the cache has no pages."""
    max_pages: int = 0
    """Entries of a row of the page table."""
    table_stride: int = 0
    """Elements from one row of the table to the next."""
    max_q: int | None = None
    """As in `Cache`."""
    splits: int | None = None
    strides_out: Strides | None = None

    @property
    def call(self) -> Cache:
        """The same as a call has it."""
        return Cache(self.page is not None, self.max_q, self.splits, self.strides_out)

    @property
    def tensors(self) -> Mapping[str, Layout]:
        """The tensors that say where keys and queries are."""
        found = {"seqlens_kv": Layout((self.sequences,), (1,), torch.int32)}
        if self.page is not None:
            shape = (self.sequences, self.max_pages)
            found["page_table"] = Layout(shape, (self.table_stride, 1), torch.int32)
        if self.max_q is not None:
            found["cu_seqlens_q"] = Layout((self.sequences + 1,), (1,), torch.int32)
        return found

    @property
    def rows(self) -> int:
        """Keys of an entry of k and v; 0 where that is `Problem.seq_kv`."""
        return self.page or 0

    def __str__(self) -> str:
        pages = "dense" if self.page is None else f"pages of {self.page}"
        return f"{pages}{'' if self.splits is None else f' splits={self.splits}'}"


def spec_of(k: torch.Tensor, cache: Cache, given: Mapping[str, torch.Tensor]) -> tuple[CacheSpec, int]:
    """The cache of a call, and the most keys that one of its sequences may have.

    `given` are the tensors that say where keys and queries are, by name.
    """
    if set(given) != set(cache.names) or any(it.dtype != torch.int32 for it in given.values()):
        got = ", ".join(f"{name} {it.dtype} {list(it.shape)}" for name, it in given.items())
        raise ValueError(f"indices: got {got or 'nothing'}; allowed {', '.join(cache.names)}, int32")
    table = given.get("page_table")
    sequences = given["seqlens_kv"].shape[0]
    entries, _, rows, _ = k.shape
    plain = CacheSpec(sequences, entries, max_q=cache.max_q, splits=cache.splits, strides_out=cache.strides_out)
    if table is None:
        return plain, rows
    max_pages = table.shape[1]
    stride = table.stride(0) if sequences > 1 else max_pages
    return plain._replace(page=rows, max_pages=max_pages, table_stride=stride), rows * max_pages


def check_cache(
    q: object,
    k_cache: object,
    v_cache: object,
    seqlens_kv: object,
    page_table: object,
    cu_seqlens_q: object,
    sinks: torch.Tensor | None,
    *,
    strides: bool = True,
) -> None:
    """TypeError or ValueError for tensors that are no cache and its queries; no value of a tensor is read.

    Without `strides` those are not asked, as by `multiattn.validate.check_inputs`.
    """
    tensors: dict[str, torch.Tensor] = {}
    ranks = {"q": "[B, Hq, Sq, D]" if cu_seqlens_q is None else "[T, Hq, D]"}
    ranks |= dict.fromkeys(("k_cache", "v_cache"), _rank_of_cache(page_table))
    for (name, shape), given in zip(ranks.items(), (q, k_cache, v_cache), strict=True):
        tensor = check_operand(name, given)
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
    sequences = _check_index("seqlens_kv", seqlens_kv, q.device, "[B]", 1, batch, strides)
    if page_table is None:
        if k.shape[0] != sequences:
            raise ValueError(
                f"k_cache without a page_table must have an entry for each of {sequences} sequences; "
                f"got shape {tuple(k.shape)}; cut it to k_cache[:{sequences}], or give a page_table"
            )
    else:
        _check_index("page_table", page_table, q.device, "[B, max_pages]", 2, sequences, strides)
    if cu_seqlens_q is not None:
        _check_index("cu_seqlens_q", cu_seqlens_q, q.device, "[B + 1]", 1, sequences + 1, strides)
    if sinks is not None:
        check_sinks(sinks, q)


def check_values(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    seqlens_kv: torch.Tensor,
    page_table: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int | None,
    left: int | None = None,
) -> None:
    """ValueError for lengths, pages or starts of queries that this cache and these queries ``[T, Hq, D]`` do not have.

    It reads them: on a GPU that waits for the device. Pages before a window that goes `left` back are nobody's.
    """
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


def _rank_of_cache(page_table: object) -> str:
    return "[B, Hkv, S, D]" if page_table is None else "[pages, Hkv, page, D]"


def _check_alike(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """TypeError or ValueError for dtypes, devices and shapes that are not of one call."""
    if not q.dtype == k.dtype == v.dtype:
        got = f"{q.dtype}, {k.dtype}, {v.dtype}; convert q by .to(k_cache.dtype)"
        raise TypeError(f"q, k_cache and v_cache must share one dtype; got {got}")
    if not q.device == k.device == v.device:
        got = f"{q.device}, {k.device}, {v.device}; move q by .to(k_cache.device)"
        raise ValueError(f"q, k_cache and v_cache must be on one device; got {got}")
    if q.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"device: got {q.device}; allowed cpu, cuda and meta; move the tensors by .cuda() or .cpu()")
    shapes = f"q={tuple(q.shape)}, k_cache={tuple(k.shape)}, v_cache={tuple(v.shape)}"
    if k.shape != v.shape:
        raise ValueError(f"k_cache and v_cache must have one shape; got {shapes}; cut both to the same entries")
    heads_q, heads_kv, head_dim = q.shape[1], k.shape[1], q.shape[-1]
    if k.shape[-1] != head_dim:
        raise ValueError(f"q, k_cache and v_cache must share head_dim; got {shapes}; pad q with zeros, and give scale")
    if head_dim < 1 or heads_q < 1 or heads_kv < 1:
        raise ValueError(f"heads and head_dim must be at least 1; got {shapes}")
    if heads_q % heads_kv:
        hint = "a cache [.., S, Hkv, D] is given as a view, k_cache.transpose(1, 2)"
        raise ValueError(f"query heads must be a multiple of key/value heads (GQA); got {shapes}; {hint}")


def _check_index(
    name: str, tensor: object, device: torch.device, shape: str, rank: int, size: int | None, strides: bool
) -> int:
    """The size of the first dimension of an int32 tensor on the device; TypeError or ValueError for another."""
    if not isinstance(tensor, torch.Tensor):
        raise not_a_tensor(name, tensor)
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name}.dtype: got {tensor.dtype}; allowed torch.int32; call .int() on it")
    if tensor.ndim != rank or (size is not None and tensor.shape[0] != size):
        allowed = shape if size is None else f"{shape}, the first dimension {size}"
        hint = _OF_EACH[name]
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}; allowed {allowed}; {hint}")
    if strides and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        got = f"{tuple(tensor.stride())}; call .contiguous() on it"
        raise ValueError(f"{name} must have unit stride on its last dimension; got strides {got}")
    if tensor.device != device:
        got = f"{tensor.device}; move it by .to(q.device)"
        raise ValueError(f"{name} must be on the device of q, {device}; got {got}")
    return tensor.shape[0]


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


def check_out(out: object, q: torch.Tensor, *, layout: bool = True) -> None:
    """TypeError or ValueError for a tensor that results cannot be written to as it is; without `layout`, copied to."""
    if not isinstance(out, torch.Tensor):
        raise not_a_tensor("out", out, "a torch.Tensor or None")
    if out.shape != q.shape or out.dtype != q.dtype or out.device != q.device or (layout and out.is_neg()):
        got, allowed = (f"{tuple(it.shape)}, {it.dtype} on {it.device}" for it in (out, q))
        raise ValueError(f"out must be like q: got {got}; allowed {allowed}; torch.empty_like(q) makes one")
    if not layout:
        return
    walked = [(stride, size) for size, stride in zip(out.shape, out.stride(), strict=True) if size > 1]
    strides = [stride for size, stride in zip(out.shape[:-1], out.stride(), strict=False) if size > 1]
    extent = 1
    for stride, size in sorted(walked):
        if stride < extent and out.numel():
            got = f"strides {tuple(out.stride())} for shape {tuple(out.shape)}"
            allowed = "strides by which no two elements have one place; torch.empty_like(q) makes one"
            raise ValueError(f"out: got {got}; allowed {allowed}")
        extent = stride * size
    unit = VECTOR_BYTES // out.element_size()
    is_aligned = not out.data_ptr() % VECTOR_BYTES and not any(stride % unit for stride in strides)
    if out.numel() and not (is_aligned and (out.shape[-1] == 1 or out.stride(-1) == 1)):
        raise ValueError(
            f"out: got strides {tuple(out.stride())}, address {out.data_ptr():#x}; allowed unit stride on D, other "
            f"strides that are multiples of {unit}, an address that is a multiple of {VECTOR_BYTES}; "
            "torch.empty_like(q) makes one"
        )


def cache_shape(spec: CacheSpec, heads_kv: int, seq_kv: int, head_dim: int) -> Shape:
    """The shape of k and v."""
    return spec.entries, heads_kv, seq_kv if spec.page is None else spec.page, head_dim


def rows_of_sequences(cu_seqlens_q: torch.Tensor, rows: int) -> torch.Tensor:
    """True for each of so many packed rows from the first sequence's on to the last's, ``[T]``."""
    row = torch.arange(rows, device=cu_seqlens_q.device)
    return (row >= cu_seqlens_q[0]) & (row < cu_seqlens_q[-1])


def area_layouts(splits: int, batch: int, heads_q: int, seq_q: int, head_dim: int) -> Mapping[str, Layout]:
    """The areas of workspace where blocks that share a row leave their parts of it.

    ``partial_out`` fp32 ``[splits, B, Hq, Sq, D]``, each divided by its own sum of weights, and ``partial_lse`` fp32
    ``[splits, B, Hq, Sq]``, in the log2 domain; -inf where a part has no key, whose partial_out nobody reads.
    """
    rows = (splits, batch, heads_q, seq_q)
    shapes = dict(zip(PARTIAL, ((*rows, head_dim), rows), strict=True))
    return {name: Layout(shape, row_major(shape), torch.float32) for name, shape in shapes.items()}
