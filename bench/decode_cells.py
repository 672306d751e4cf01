"""Decode as data: a `DecodeCell` is a few queries of each sequence over a cache of its keys and values.

A cache is dense, or lies in pages in random order. Launches go round copies of it that together pass four times the L2,
so that nobody finds its keys there.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch

from bench import features
from bench.matrix import Cell, InputError
from multiattn import kvcache
from multiattn.layout import DTYPES, STORED
from multiattn.operands import Operands, Options
from multiattn.problem import Problem, problem_of
from multiattn.sequences import SCALES

COLD = 4
"""The copies of a cache together, in units of the L2. At random replacement 2 % of a copy is left at its next turn."""
COPIES_ON_CPU = 2
BALANCE = 188
"""FLOP for each byte of keys and values from which products bound a cell. H200, 2026-11-28: 799 TFLOPS of a matrix
product over 4.25 TB/s of a copy."""
LARGEST_BYTES = 32 << 30
"""Keys and values of the largest cell."""
LARGEST_NUMBER = {"e4m3": 448, "int8": 127}
SPAN = 6
"""The normal value that becomes the largest number of 8 bits, as do the few beyond it."""
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
    scales: Mapping[str, torch.Tensor]
    """Arguments of the public call: the scales of 8-bit numbers, one for all copies."""
    scores: Mapping[str, Any]
    """Arguments of the public call that change or hide scores."""


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
    stored: str | None = None
    """The 8-bit numbers of the cache, of `STORED`; None: it has those of q."""
    per_token: bool = False
    """Scales are of each token and head; else of each head of a sequence."""
    allowed: ClassVar[tuple[features.Feature, ...]] = features.OVER_CACHE

    def __post_init__(self) -> None:
        Cell.__post_init__(self)
        if self.stored not in (None, *STORED) or (self.per_token and self.stored is None):
            got = f"{self.stored!r} per_token={self.per_token}"
            raise ValueError(f"stored: got {got}; allowed None without scales, {', '.join(STORED)}")
        if self.causal != (self.queries > 1):
            raise ValueError(f"causal: got {self.causal}; allowed {self.queries > 1} of {self.queries} queries")
        if self.page is not None and self.seq % self.page:
            raise ValueError(f"page: got {self.page}; allowed None, or a divisor of seq={self.seq}")
        if self.latent and self.width_v > self.head_dim:
            raise ValueError(f"head_dim_v: got {self.width_v}; allowed up to head_dim={self.head_dim} of a latent cell")

    @property
    def cache(self) -> str:
        """``dense`` or ``page16``, and ``e4m3`` and ``tokens`` of 8-bit numbers with scales of tokens."""
        numbers = "" if self.stored is None else f" {self.stored}"
        return ("dense" if self.page is None else f"page{self.page}") + numbers + " tokens" * self.per_token

    @property
    def is_plain(self) -> bool:
        """True if the cache has numbers of q's dtype, and no score is changed or hidden beyond the band."""
        return self.stored is None and self.feature == "none"

    @property
    def key(self) -> str:
        """The name of the cell in results and on the terminal; distinct for distinct cells."""
        kind = "mixed " if self.mixed else ""
        sizes = f"B{self.batch} H{self.heads_text} Q{self.queries} N{self.seq} D{self.widths}"
        feature = "" if self.feature == "none" else f" {self.feature}"
        return f"{kind}{sizes} {self.dtype} {self.cache}{' latent' * self.latent}{feature}"

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
        if self.feature == "tree":
            before = self.batch * self.queries * (self.seq - self.queries)
            return before + int(features.draw_trees(self.batch, self.queries).sum())
        pairs = zip(self.lengths_q, self.lengths_kv, strict=True)
        return sum(self.band.count_pairs(*its) for its in pairs)

    @property
    def _bytes_of_key(self) -> int:
        """Bytes of a key and its value in memory: values that are in keys count once."""
        dtype = DTYPES[self.dtype] if self.stored is None else STORED[self.stored]
        return (self.head_dim if self.latent else self.head_dim + self.width_v) * dtype.itemsize

    @property
    def cache_bytes(self) -> int:
        """Bytes of all keys, values and scales that a launch has to read, of a latent cell of keys alone."""
        keys = sum(self.lengths_kv)
        scales = 0 if self.stored is None else len(SCALES) * 4 * (keys if self.per_token else self.batch)
        return self._sizes[1][0] * (keys * self._bytes_of_key + scales)

    @property
    def moved_bytes(self) -> int:
        """Bytes that every launch has to move: keys, values, scales, q and out, each once."""
        of_rows = (self.head_dim + self.width_v) * DTYPES[self.dtype].itemsize
        return self.cache_bytes + sum(self.lengths_q) * self.heads * of_rows

    @property
    def has_rate_of_memory(self) -> bool:
        """True if memory bounds it: its rate is told in TB/s, that of other cells in TFLOPS."""
        flop = 2 * self.queries * self.group * (self.head_dim + self.width_v)  # for a key of a head
        return flop < BALANCE * self._bytes_of_key or self.mixed

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
        """The Problem of the public call, made without memory."""
        return replace(problem_of(*self.asked(self.tensors("meta"))), v_in_k=self.latent)

    def asked(self, tensors: Any, **more: Any) -> tuple[Operands, Options]:
        """The public call of a `Served`, with the first copy of its cache, as it reads its arguments."""
        (k, v), given = tensors.caches[0], self.arguments(tensors) | more
        return kvcache.cached_call(tensors.q, k, v, given, kvcache.Where.of(given))

    def tensors(self, device: torch.device | str) -> Any:
        """A `Served`."""
        device = torch.device(device)
        on_meta = device.type == "meta"
        generator = None if on_meta else torch.Generator(device=device).manual_seed(self.seq * 1000 + self.head_dim)
        dtype, heads_kv = DTYPES[self.dtype], self._sizes[1][0]

        def draw(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=dtype, device=device)

        def draw_cache(*shape: int) -> torch.Tensor:
            if self.stored is None:
                return draw(*shape)
            largest = LARGEST_NUMBER[self.stored]
            numbers = draw(*shape).mul_(largest / SPAN).clamp_(-largest, largest)
            return (numbers.round_() if self.stored == "int8" else numbers).to(STORED[self.stored])

        def draw_scales(*shape: int) -> torch.Tensor:
            """Half to one and a half of what makes normal values of the numbers."""
            assert self.stored is not None
            drawn = torch.rand(shape, generator=generator, device=device)
            return (drawn + 0.5) * (SPAN / LARGEST_NUMBER[self.stored])

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
            draw_pages = torch.Generator().manual_seed(pages)
            order = torch.empty(pages) if on_meta else torch.randperm(pages, generator=draw_pages)
            table = order.view(self.batch, -1).to(device, torch.int32)
        widths = (self.head_dim,) if self.latent else (self.head_dim, self.width_v)
        drawn = [draw_cache(*shape, width).transpose(1, 2) for width in widths]
        copies = [drawn, *([it.clone() for it in drawn] for _ in range(self.copies(device) - 1))]
        caches = tuple((its[0], its[0][..., : self.width_v] if self.latent else its[1]) for its in copies)
        lengths = torch.tensor(self.lengths_kv, dtype=torch.int32, device=device)
        of_scales = drawn[0].shape[:3] if self.per_token else (self.batch, heads_kv)
        scales = {} if self.stored is None else {name: draw_scales(*of_scales) for name in SCALES}
        scores: dict[str, Any] = {}
        if self.feature == "alibi":
            scores["alibi_slopes"] = features.slopes_of(self.heads, device)
        if self.feature == "relative":
            table_of_bias = draw(self.heads, features.EXTENT, dtype=torch.float32)
            scores["score_mod"] = features.make_relative(table_of_bias)
        if self.feature == "tree":
            scores["bias"] = features.draw_trees(self.batch, self.queries).to(device)
        return Served(q, lengths, table, starts, caches, scales, scores)

    def empty_out(self, served: Served) -> torch.Tensor:
        """A result that nobody has written yet, in memory as q is."""
        rows = served.q if served.q.dim() == 3 else served.q.transpose(1, 2)
        out = rows.new_empty((*rows.shape[:-1], self.width_v))
        return out if served.q.dim() == 3 else out.transpose(1, 2)

    def arguments(self, tensors: Any) -> dict[str, Any]:
        """The keyword arguments of `multiattn.fmha_kvcache` behind q and the caches; a tree needs no causal mask."""
        found: dict[str, Any] = {"seqlens_kv": tensors.seqlens_kv, "causal": self.causal}
        found |= {**tensors.scales, **tensors.scores} | ({"causal": False} if "bias" in tensors.scores else {})
        if tensors.page_table is not None:
            found["page_table"] = tensors.page_table
        if tensors.cu_seqlens_q is not None:
            found |= {"cu_seqlens_q": tensors.cu_seqlens_q, "max_seqlen_q": max(self.lengths_q)}
        return found


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


def _eight_bits() -> Iterable[DecodeCell]:
    """Caches of 8-bit numbers, with scales of heads, and for e4m3 of tokens, too."""
    sizes = replace(PLAIN, batch=32, heads=8, heads_kv=1, seq=32768), replace(PLAIN, batch=8)
    for page, its, (stored, per_token) in itertools.product(
        (None, 16, 64), sizes, (("e4m3", False), ("e4m3", True), ("int8", False))
    ):
        yield replace(its, page=page, stored=stored, per_token=per_token)


def _scores() -> Iterable[DecodeCell]:
    """A bias of distance as Inkling has it, ALiBi, and trees of drafted tokens."""
    long = replace(PLAIN, batch=8, seq=32768)
    for page in (None, 64):
        yield replace(long, page=page, feature="relative")
        yield replace(long, page=page, feature="alibi")
        for queries in (64, 16):
            yield replace(PLAIN, batch=8, page=page, queries=queries, causal=True, feature="tree")


def _chunks() -> Iterable[DecodeCell]:
    chunk = replace(PLAIN, heads=8, heads_kv=1, seq=65536, queries=CHUNK, causal=True)
    for page in (16, None, 64):
        yield replace(chunk, page=page)
    for page in (16, None, 64):
        yield replace(chunk, page=page, batch=64, heads=32, heads_kv=8, seq=8192, mixed=True)


CELLS: tuple[DecodeCell, ...] = (
    *(*_one_query(128), *_few_queries(), *_latent(), *_own_widths(), *_eight_bits(), *_scores()),
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
