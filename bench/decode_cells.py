"""Decode as data: a `DecodeCell` is a few queries of each sequence over a cache of its keys and values.

A cache is dense, or lies in pages in random order. Launches go round copies of it that together pass four times the L2,
so that nobody finds its keys there.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from bench.matrix import Cell, InputError
from multiattn.layout import DTYPES
from multiattn.problem import Problem
from multiattn.sequences import Batching

COLD = 4
"""The copies of a cache together, in units of the L2. At random replacement 2 % of a copy is left at its next turn."""
COPIES_ON_CPU = 2
BALANCE = 188
"""FLOP for each byte of keys and values from which products bound a cell. H200, 2026-11-28: 799 TFLOPS of a matrix
product over 4.25 TB/s of a copy."""
LARGEST_BYTES = 32 << 30
"""Keys and values of the largest cell."""
CHUNKS, CHUNK = 4, 512
"""Sequences of a mixed batch that prefill, and the queries of each; the others have one query."""


class Served(NamedTuple):
    """The tensors of a cell by name: normal values of a fixed seed, the same in each copy of the cache."""

    q: torch.Tensor
    """``[B, Hq, Sq, D]``, or packed ``[T, Hq, D]``."""
    seqlens_kv: torch.Tensor
    page_table: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    caches: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """The copies: keys and values ``[B, Hkv, S, D]`` or ``[pages, Hkv, page, D]``, heads inside of tokens in memory;
    of a latent cell views of one tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeCell(Cell):
    """One problem over a cache; `seq` is the keys of the longest sequence."""

    queries: int = 1
    """The queries of each sequence, which are its last; of a mixed batch those of a chunk."""
    page: int | None = None
    """Tokens of a page; None: the cache is dense."""
    mixed: bool = False
    """Chunks of prefill beside decodes, with packed queries."""
    latent: bool = False
    """v is a view of the first columns of k, as in absorbed latent attention (MLA): `Problem.v_in_k`."""

    def __post_init__(self) -> None:
        Cell.__post_init__(self)
        if self.causal != (self.queries > 1):
            raise ValueError(f"causal: got {self.causal}; allowed {self.queries > 1} of {self.queries} queries")
        if self.page is not None and self.seq % self.page:
            raise ValueError(f"page: got {self.page}; allowed None, or a divisor of seq={self.seq}")
        if self.latent and self.width_v > self.head_dim:
            raise ValueError(f"head_dim_v: got {self.width_v}; allowed up to head_dim={self.head_dim} of a latent cell")

    @property
    def cache(self) -> str:
        """``dense`` or ``page16``."""
        return "dense" if self.page is None else f"page{self.page}"

    @property
    def key(self) -> str:
        """The name of the cell in results and on the terminal; distinct for distinct cells."""
        kind = "mixed " if self.mixed else ""
        sizes = f"B{self.batch} H{self.heads_text} Q{self.queries} N{self.seq} D{self.widths}"
        return f"{kind}{sizes} {self.dtype} {self.cache}{' latent' * self.latent}"

    @property
    def lengths_q(self) -> tuple[int, ...]:
        """The queries of each sequence."""
        if not self.mixed:
            return (self.queries,) * self.batch
        return (self.queries,) * CHUNKS + (1,) * (self.batch - CHUNKS)

    @property
    def lengths_kv(self) -> tuple[int, ...]:
        """The keys of each sequence; those of decodes beside chunks are drawn from an eighth of `seq` on."""
        if not self.mixed:
            return (self.seq,) * self.batch
        draw = torch.Generator().manual_seed(self.seq)
        others = torch.randint(self.seq // 8, self.seq + 1, (self.batch - CHUNKS,), generator=draw)
        return (self.seq,) * CHUNKS + tuple(others.tolist())

    @property
    def total_pairs(self) -> int:
        """(query, key) pairs that count, of one head of all sequences."""
        pairs = zip(self.lengths_q, self.lengths_kv, strict=True)
        return sum(self.band.count_pairs(*its) for its in pairs)

    @property
    def _columns(self) -> int:
        """Elements of a key and its value in memory: values that are in keys count once."""
        return self.head_dim if self.latent else self.head_dim + self.width_v

    @property
    def cache_bytes(self) -> int:
        """Bytes of all keys and values that a launch has to read, of a latent cell of keys alone."""
        return sum(self.lengths_kv) * self._sizes[1][0] * self._columns * DTYPES[self.dtype].itemsize

    @property
    def moved_bytes(self) -> int:
        """Bytes that every launch has to move: keys, values, q and out, each once."""
        of_rows = (self.head_dim + self.width_v) * DTYPES[self.dtype].itemsize
        return self.cache_bytes + sum(self.lengths_q) * self.heads * of_rows

    @property
    def has_rate_of_memory(self) -> bool:
        """True if memory bounds it: its rate is told in TB/s, that of other cells in TFLOPS."""
        flop = 2 * self.queries * self.group * (self.head_dim + self.width_v)  # for a key of a head
        return flop < BALANCE * self._columns * DTYPES[self.dtype].itemsize or self.mixed

    @property
    def work(self) -> str:
        """``decode``, ``prefill chunk`` or ``mixed batch``."""
        return "mixed batch" if self.mixed else "decode" if self.queries < CHUNK else "prefill chunk"

    def copies(self, device: torch.device) -> int:
        """The copies of the cache that launches go round."""
        if device.type != "cuda":
            return COPIES_ON_CPU
        l2 = int(torch.cuda.get_device_properties(device).L2_cache_size)
        return math.ceil(COLD * l2 / self.cache_bytes)

    @property
    def problem(self) -> Problem:
        """The Problem of the public call."""
        pages = self.seq // (self.page or self.seq)  # of one sequence
        max_pages = pages if self.page is not None else 0
        longest = max(self.lengths_q) if self.mixed else None
        return Problem.contiguous(
            batch=1 if self.mixed else self.batch,
            heads_q=self.heads,
            heads_kv=self.heads_kv,
            seq_q=sum(self.lengths_q) if self.mixed else self.queries,
            seq_kv=self.seq,
            head_dim=self.head_dim,
            head_dim_v=self.width_v,
            dtype=self.dtype,
            band=self.band,
            v_in_k=self.latent,
            batching=Batching.cached(self.batch, self.batch * pages, self.page, max_pages, max_q=longest),
        )

    def tensors(self, device: torch.device | str) -> Any:
        """A `Served`."""
        device = torch.device(device)
        generator = torch.Generator(device=device).manual_seed(self.seq * 1000 + self.head_dim)
        dtype, heads_kv = DTYPES[self.dtype], self._sizes[1][0]

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=dtype, device=device)

        table = starts = None
        if self.mixed:
            q = draw(sum(self.lengths_q), self.heads, self.head_dim)
            starts = starts_of(self.lengths_q, device)
        else:
            q = draw(self.batch, self.queries, self.heads, self.head_dim).transpose(1, 2)
        shape = self.batch, self.seq, heads_kv
        if self.page is not None:
            pages = self.batch * self.seq // self.page
            shape = pages, self.page, heads_kv
            order = torch.randperm(pages, generator=torch.Generator().manual_seed(pages))
            table = order.view(self.batch, -1).to(device, torch.int32)
        widths = (self.head_dim,) if self.latent else (self.head_dim, self.width_v)
        drawn = [draw(*shape, width).transpose(1, 2) for width in widths]
        copies = [drawn, *([it.clone() for it in drawn] for _ in range(self.copies(device) - 1))]
        caches = tuple((its[0], its[0][..., : self.width_v] if self.latent else its[1]) for its in copies)
        lengths = torch.tensor(self.lengths_kv, dtype=torch.int32, device=device)
        return Served(q, lengths, table, starts, caches)

    def empty_out(self, served: Served) -> torch.Tensor:
        """A result that nobody has written yet, in memory as q is."""
        rows = served.q if served.q.dim() == 3 else served.q.transpose(1, 2)
        out = rows.new_empty((*rows.shape[:-1], self.width_v))
        return out if served.q.dim() == 3 else out.transpose(1, 2)

    def arguments(self, tensors: Any) -> dict[str, Any]:
        """The keyword arguments of `multiattn.fmha_kvcache` behind q and the caches."""
        found: dict[str, Any] = {"seqlens_kv": tensors.seqlens_kv, "causal": self.causal}
        if tensors.page_table is not None:
            found["page_table"] = tensors.page_table
        if tensors.cu_seqlens_q is not None:
            found |= {"cu_seqlens_q": tensors.cu_seqlens_q, "max_seqlen_q": max(self.lengths_q)}
        return found

    def dense(self, served: Served, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the sequences from `first` to before `last`, ``[n, Hkv, S, D]``, as long as the first."""
        length = self.lengths_kv[first]

        def gathered(cache: torch.Tensor) -> torch.Tensor:
            if served.page_table is None:
                return cache[first:last, :, :length]
            pages = cache[served.page_table[first:last].long()]  # [n, pages of each, Hkv, page, D]
            return pages.transpose(1, 2).flatten(2, 3)[:, :, :length]

        k, v = served.caches[0]
        return gathered(k), gathered(v)


def starts_of(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Where each of some sequences begins that lie one after another, and where the last ends, int32."""
    return torch.tensor((0, *itertools.accumulate(lengths)), dtype=torch.int32, device=device)


PLAIN = DecodeCell(batch=1, heads=64, heads_kv=8, seq=8192, head_dim=128, dtype="bf16", causal=False, layout="bshd")


def _one_query(head_dim: int) -> Iterable[DecodeCell]:
    heads = ((64, 8), (32, 8), (16, None), (8, 1))
    for page, (heads_q, heads_kv), seq, batch in itertools.product(
        (16, None, 64), heads, (8192, 131072, 1024, 32768), (1, 8, 32, 128)
    ):
        yield replace(PLAIN, head_dim=head_dim, page=page, heads=heads_q, heads_kv=heads_kv, seq=seq, batch=batch)


def _few_queries() -> Iterable[DecodeCell]:
    for page, seq, batch, queries in itertools.product((16, None), (8192, 32768), (1, 8, 32), (2, 4, 8, 16)):
        yield replace(PLAIN, page=page, seq=seq, batch=batch, queries=queries, causal=True)


def _latent() -> Iterable[DecodeCell]:
    """Absorbed latent attention of DeepSeek's kind, on one GPU of eight and on all heads, and of a narrower latent."""
    for page, (batch, heads), queries in itertools.product((64, None), ((64, 16), (16, 128)), (1, 2, 4)):
        yield _wide(576, 512, page, queries, batch=batch, heads=heads, heads_kv=1, latent=True)
    for page, queries in itertools.product((64, None), (1, 4)):
        yield _wide(320, 256, page, queries, batch=64, heads=16, heads_kv=1, latent=True)


def _wide(head_dim: int, head_dim_v: int, page: int | None, queries: int, **more: Any) -> DecodeCell:
    """A cell whose values have a width of their own."""
    sizes = {"head_dim": head_dim, "head_dim_v": head_dim_v, "page": page, "queries": queries, **more}
    return replace(PLAIN, **sizes, causal=queries > 1)


def _own_widths() -> Iterable[DecodeCell]:
    """Full attention of MiMo's kind."""
    for page, queries in itertools.product((64, None), (1, 4)):
        yield _wide(192, 128, page, queries, batch=32, heads=64, heads_kv=4)


def _chunks() -> Iterable[DecodeCell]:
    chunk = replace(PLAIN, heads=8, heads_kv=1, seq=65536, queries=CHUNK, causal=True)
    for page in (16, None, 64):
        yield replace(chunk, page=page)
    for page in (16, None, 64):
        yield replace(chunk, page=page, batch=64, heads=32, heads_kv=8, seq=8192, mixed=True)


CELLS: tuple[DecodeCell, ...] = (
    *(*_one_query(128), *_few_queries(), *_latent(), *_own_widths()),
    *(*_chunks(), *_one_query(64), *_one_query(256)),
)
"""All cells, those that say most first, as a run may end before the last."""


def too_large(cell: DecodeCell, memory_bytes: int | None = None) -> str:
    """The reason why a cell is left out, or nothing; `memory_bytes` is the device's."""
    allowed = LARGEST_BYTES if memory_bytes is None else min(LARGEST_BYTES, memory_bytes // 2)
    if cell.cache_bytes <= allowed:
        return ""
    return f"memory: got {cell.cache_bytes / 1e9:.1f} GB of keys and values; allowed up to {allowed / 1e9:.1f} GB"


def matching(patterns: Sequence[str], cells: Sequence[DecodeCell] = CELLS) -> tuple[DecodeCell, ...]:
    """The cells that some pattern fits, all without any. Each word of a pattern fits a word of the cell's name.

    ``H64/8 Q1 page*``: `fnmatch`'s wildcards. InputError for a pattern that fits no cell.
    """
    found: set[DecodeCell] = set()
    for pattern in patterns:
        mine = [cell for cell in cells if _fits(pattern, cell)]
        if not mine:
            raise InputError(f"--cells: got {pattern!r}; allowed words as in {cells[0].key!r}")
        found.update(mine)
    return tuple(cell for cell in cells if cell in found or not patterns)


def _fits(pattern: str, cell: DecodeCell) -> bool:
    words = cell.key.split()
    return all(fnmatch.filter(words, wanted) for wanted in pattern.split())
