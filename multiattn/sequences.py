"""Kinds of batches: B entries of one length, sequences packed one after another, or keys in a cache, perhaps in pages.

Where the sequences start and how long they are stays in tensors on the device, which the host of a GPU never reads:
one CUDA graph serves every step.

- *packed*: sequence b has the rows of q from ``cu_seqlens_q[b]`` on, up to ``cu_seqlens_q[b + 1]``, and so those of k
  and v. A cu_seqlens is int32 ``[B + 1]``, starts with 0 and never falls.
- *cache*: there is room for more keys than a sequence has; how many each has is ``seqlens_kv``, int32 ``[B]``. The
  keys of sequence b are entry b of ``[B, Hkv, S, D]``.
- *pages*: the cache is ``[pages, Hkv, page, D]``, and key j of sequence b is row ``j % page`` of page ``page_table[b, j
  // page]``, int32 ``[B, max_pages]``. An entry of the table whose keys are all beyond the sequence's length, or before
  all windows, is never read, nor is a row of a page there. Several sequences may share a page.

Inside this package k and v of a call with a cache are the caches as they are given, and packed queries ``[T, Hq, D]``
are a batch of one, ``[1, Hq, T, D]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch

from multiattn.layout import Layout, Shape, Strides, row_major
from multiattn.packed import LIST_FIELDS, ROWS_MIN, TILE_LISTS

SPLITS_MAX = 256
"""The most parts that the keys of a sequence are divided into, as in FlashAttention-3."""

CU_SEQLENS = ("cu_seqlens_q", "cu_seqlens_kv")
"""The tensors that say where sequences of a packed batch start, in q and in k."""

SCALES = ("k_scale", "v_scale")
"""The tensors that a cache of 8-bit numbers is multiplied by."""

CACHE_TENSORS = ("seqlens_kv", "page_table", "cu_seqlens_q", *SCALES)
"""The tensors that say where a cache has keys and where packed queries over it start, and those of its scales."""

PARTIAL = ("partial_out", "partial_lse", "partial_max")
"""Areas of workspace: `area_layouts` says what is where."""

Kind = Literal["packed", "cache", "pages"]
_KINDS: tuple[Kind, ...] = get_args(Kind)


class Indices(NamedTuple):
    """Tensors, int32 on the device, that say where sequences, keys and blocks are; None where a call has none.

    The scales of a cache, fp32, are among them, as what is known of a cache beside its numbers.
    """

    cu_seqlens_q: torch.Tensor | None = None
    """``[B + 1]``: where the queries of each sequence start, in a packed batch or packed queries over a cache."""
    cu_seqlens_kv: torch.Tensor | None = None
    """Where its keys start, in a packed batch."""
    seqlens_kv: torch.Tensor | None = None
    """``[B]``: how many keys each sequence has in its cache."""
    page_table: torch.Tensor | None = None
    """``[B, max_pages]``: the pages of each sequence."""
    k_scale: torch.Tensor | None = None
    """``[B, Hkv]`` or one for each token, ``[B, Hkv, S]`` or ``[pages, Hkv, page]``: `Scaling`."""
    v_scale: torch.Tensor | None = None
    """Like k_scale, of the values."""
    kv_num_blocks: torch.Tensor | None = None
    """From here on the lists of a block mask: `multiattn.block_mask.LISTS`."""
    kv_indices: torch.Tensor | None = None
    full_kv_num_blocks: torch.Tensor | None = None
    full_kv_indices: torch.Tensor | None = None
    q_num_blocks: torch.Tensor | None = None
    q_indices: torch.Tensor | None = None
    full_q_num_blocks: torch.Tensor | None = None
    full_q_indices: torch.Tensor | None = None

    @property
    def given(self) -> tuple[torch.Tensor, ...]:
        """The tensors that there are."""
        some = self[:_OF_SEQUENCES] if self.kv_num_blocks is None else self
        return tuple([it for it in some if it is not None])

    @property
    def named(self) -> Mapping[str, torch.Tensor]:
        """The tensors that there are, by name."""
        return {name: it for name, it in zip(self._fields, self, strict=True) if it is not None}


_OF_SEQUENCES = Indices._fields.index("kv_num_blocks")
"""How many are no lists of a block mask: a call of a packed batch or over a cache asks no more of them."""
NO_INDICES = Indices()


class Scaling(NamedTuple):
    """The scales of the keys of a cache, or of its values: of each head of a sequence, or of each token and head."""

    per_token: bool = False
    shape: Shape = ()
    """``[B, Hkv]``; of tokens ``[B, Hkv, S]``, with pages ``[pages, Hkv, page]``."""
    strides: Shape = ()
    """In elements; 0 where scales are broadcast."""

    @property
    def layout(self) -> Layout:
        """The layout of the tensor."""
        return Layout(self.shape, self.strides, torch.float32)


class Batching(NamedTuple):
    """A batch that is not B entries of one length. A call knows no sizes; a problem has them all."""

    kind: Kind = "packed"
    max_q: int | None = None
    """The most queries of a sequence of a packed batch, where scores load from a tensor with room for so many; None:
    nothing is checked by it. Over a cache the most of packed queries; None: they are ``[B, Hq, Sq, D]``."""
    max_kv: int | None = None
    """The most keys of a sequence of a packed batch, like `max_q`."""
    splits: int | None = None
    """The parts that the caller has the keys of a cache divided into; None leaves it to the plan."""
    strides_out: Strides | None = None
    """Strides (B, H, S) of the caller's own out; None: results are laid out like q."""
    sequences: int = 0
    entries: int = 0
    """The first dimension of a cache: batch entries, or pages."""
    page: int | None = None
    """Keys of a page; None: the cache has no pages."""
    max_pages: int = 0
    """Entries of a row of the page table."""
    table_stride: int = 0
    """Elements from one row of the table to the next."""
    k_scaling: Scaling | None = None
    """The scales of a cache of 8-bit numbers; None: it has numbers of the dtype of q."""
    v_scaling: Scaling | None = None

    @classmethod
    def packed(cls, sequences: int, max_q: int | None = None, max_kv: int | None = None) -> Batching:
        """So many packed sequences."""
        return cls("packed", max_q, max_kv, sequences=sequences)

    @classmethod
    def cached(cls, sequences: int, entries: int, page: int | None = None, max_pages: int = 0, **more: Any) -> Batching:
        """So many sequences over a cache of so many entries, with `more` fields; rows of a page table are dense."""
        plain = cls("cache" if page is None else "pages", sequences=sequences, entries=entries, page=page)
        return plain._replace(max_pages=max_pages, table_stride=max_pages, **more)

    @property
    def has_packed_queries(self) -> bool:
        """True if q is ``[1, Hq, T, D]``, of sequences one after another."""
        return self.kind == "packed" or self.max_q is not None

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that say where keys and queries are."""
        if self.kind == "packed":
            return CU_SEQLENS
        has = {"seqlens_kv": True, "page_table": self.kind == "pages", "cu_seqlens_q": self.max_q is not None}
        has |= {"k_scale": self.k_scaling is not None, "v_scale": self.v_scaling is not None}
        return tuple(name for name in CACHE_TENSORS if has[name])

    @property
    def tensors(self) -> Mapping[str, Layout]:
        """The layouts of these tensors, by their names."""
        starts = Layout((self.sequences + 1,), (1,), torch.int32)
        found = dict.fromkeys(CU_SEQLENS, starts)
        found["seqlens_kv"] = Layout((self.sequences,), (1,), torch.int32)
        found["page_table"] = Layout((self.sequences, self.max_pages), (self.table_stride, 1), torch.int32)
        found |= {name: it.layout for name, it in self.scalings.items()}
        return {name: found[name] for name in self.names}

    @property
    def scalings(self) -> Mapping[str, Scaling]:
        """The scales that there are, by the names of their tensors."""
        pairs = zip(SCALES, (self.k_scaling, self.v_scaling), strict=True)
        return {name: it for name, it in pairs if it is not None}

    @property
    def per_token(self) -> tuple[str, ...]:
        """The names of the scales that are of each token."""
        return tuple(name for name, it in self.scalings.items() if it.per_token)

    @property
    def _scaling_bits(self) -> int | None:
        """A bit for each of the scales that are of tokens; None without scales."""
        given = tuple(self.scalings.values())  # a view that is empty is True to Dynamo
        return sum(it.per_token << place for place, it in enumerate(given)) if given else None

    @property
    def numbers(self) -> list[int]:
        """The part that a call knows, as an op takes it; strides of results are the caller's matter there.

        The kind, a bit for each number that there is, and these numbers: none is compared, as a graph may have symbols.
        """
        numbers = (self.max_q, self.max_kv, self.splits, self._scaling_bits)
        given = sum(1 << place for place, it in enumerate(numbers) if it is not None)
        return [_KINDS.index(self.kind), given, *(it for it in numbers if it is not None)]

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> Batching:
        """The batch that has these `numbers`."""
        kind, given, *others = numbers
        left = iter(others)
        max_q, max_kv, splits, per_token = (next(left) if given >> place & 1 else None for place in range(4))
        found = cls(_KINDS[kind], max_q, max_kv, splits)
        if per_token is None:
            return found
        return found._replace(k_scaling=Scaling(bool(per_token & 1)), v_scaling=Scaling(bool(per_token & 2)))

    def sized(self, k: torch.Tensor, given: Mapping[str, torch.Tensor]) -> Batching:
        """The batch of these keys and of the tensors that say where they and queries are, by name.

        ValueError for other tensors than a launch takes.
        """
        ranks = {"page_table": 2, **{name: 2 + it.per_token for name, it in self.scalings.items()}}
        if set(given) != set(self.names) or any(
            it.dtype != (torch.float32 if name in SCALES else torch.int32) or it.ndim != ranks.get(name, 1)
            for name, it in given.items()
        ):
            got = ", ".join(f"{name} {it.dtype} {list(it.shape)}" for name, it in given.items())
            raise ValueError(f"indices: got {got or 'nothing'}; allowed {', '.join(self.names)}, int32 but for scales")
        if self.kind == "packed":
            starts, others = (given[name].shape[0] for name in CU_SEQLENS)
            if starts != others:
                raise ValueError(
                    f"indices: got cu_seqlens of {starts} and of {others} numbers; allowed as many of each"
                )
            return self._replace(sequences=starts - 1)
        found = self._replace(sequences=given["seqlens_kv"].shape[0], entries=k.shape[0])
        if self.k_scaling is not None and self.v_scaling is not None:
            of_k, of_v = (
                it._replace(shape=tuple(given[name].shape), strides=given[name].stride())
                for name, it in self.scalings.items()
            )
            found = found._replace(k_scaling=of_k, v_scaling=of_v)
        if self.kind == "cache":
            return found
        table = given["page_table"]
        stride = table.stride(0) if found.sequences > 1 else table.shape[1]
        return found._replace(page=k.shape[2], max_pages=table.shape[1], table_stride=stride)

    def longest(self, rows_q: int, rows_kv: int) -> tuple[int, int]:
        """The most queries and keys of a packed sequence that kernels may take, of so many rows of each."""
        return self.max_q or rows_q, self.max_kv or rows_kv

    def tile_layouts(self, *rows: int) -> Mapping[str, Layout]:
        """The lists of tiles of so many queries and keys in all, of a packed batch, by the names of their areas."""
        shapes = ((self.tiles_max(it, ROWS_MIN), len(LIST_FIELDS)) for it in rows)
        return {name: Layout(it, row_major(it), torch.int32) for name, it in zip(TILE_LISTS, shapes, strict=True)}

    def tiles_max(self, rows: int, tile: int) -> int:
        """The most tiles that so many rows can have: each sequence, and what is around them, ends with a part."""
        return rows // tile + self.sequences + 2

    def cache_shape(self, heads_kv: int, seq_kv: int, head_dim: int) -> Shape:
        """The shape of k and v of a cache."""
        return self.entries, heads_kv, seq_kv if self.page is None else self.page, head_dim

    def __str__(self) -> str:
        if self.kind == "packed":
            return self.kind
        pages = "dense" if self.page is None else f"pages of {self.page}"
        pages += "".join(f" {name} of tokens" for name in self.per_token)
        return f"{pages}{'' if self.splits is None else f' splits={self.splits}'}"


def rows_of_sequences(cu_seqlens_q: torch.Tensor, rows: int) -> torch.Tensor:
    """True for each of so many packed rows from the first sequence's on to the last's, ``[T]``."""
    row = torch.arange(rows, device=cu_seqlens_q.device)
    return (row >= cu_seqlens_q[0]) & (row < cu_seqlens_q[-1])


def area_layouts(
    splits: int, batch: int, heads_q: int, seq_q: int, head_dim: int, *, row_max: bool = False
) -> Mapping[str, Layout]:
    """The areas of workspace where blocks that share a row leave their parts of it.

    ``partial_out`` fp32 ``[splits, B, Hq, Sq, D]``, each divided by its own sum of weights, and ``partial_lse`` fp32
    ``[splits, B, Hq, Sq]``, in the log2 domain; -inf where a part has no key, whose partial_out nobody reads.
    With `row_max` also ``partial_max``, like partial_lse: the largest score of each row there.
    """
    rows = (splits, batch, heads_q, seq_q)
    shapes: dict[str, Shape] = dict(
        zip(PARTIAL, ((*rows, head_dim), rows, *((rows,) if row_max else ())), strict=False)
    )
    return {name: Layout(shape, row_major(shape), torch.float32) for name, shape in shapes.items()}
