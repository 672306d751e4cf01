"""One case: a problem with its layout and values, and the reason it is there."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Literal

import torch

from multiattn.layout import widths
from multiattn.mask import Window

Size = Literal["any", "gpu", "huge"]
"""`any`: interpreted in about 0.1 s. `gpu`: too many scores for that. `huge`: past 2^31 elements, alone on a GPU."""

DType = Literal["fp16", "bf16"]
Stored = Literal["e4m3", "int8"]
"""Dtypes of a cache of 8-bit numbers."""
Scales = Literal["number", "head", "batch", "token"]
"""The granularity of scales: one number, ``[Hkv]``, ``[B, Hkv]``, or one for each token and head."""
Broadcast = Literal["none", "heads", "batch"]

Values = Literal[
    "normal",
    "large",
    "ascending",
    "descending",
    "twin_peaks",
    "nan_q",
    "nan_k",
    "inf_k",
    "inf_k_blocks",
    "nan_v",
    "inf_v",
    "nan_neighbours",
]
"""How q, k and v are drawn; `parity.tensors` says what each is."""

Sinks = Literal["none", "normal", "large", "some"]
"""A sink for each head: none, as large as scores are, above the scores, or -inf for the first head."""

PLANTED: tuple[Values, ...] = ("nan_q", "nan_k", "inf_k", "inf_k_blocks", "nan_v", "inf_v")
"""Values that are NaN or inf in some places."""

BACKWARD_HEAD_DIM_MAX = 512
"""The widest head that any backend has a backward for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Where q, k and v lie in memory. The default: three contiguous ``[B, H, S, D]`` tensors, 16-byte aligned.

    `packed` is one ``[B, S, Hq + 2 * Hkv, D]`` tensor, as a fused projection makes it.
    """

    order: Literal["bhsd", "bshd", "packed"] = "bhsd"
    offset: int = 0
    """Elements between a 16-byte boundary and the first element."""
    row_pad: int = 0
    """Unused elements after each row of D (`bhsd`) or each token of H * D (`bshd`)."""
    broadcast: Broadcast = "none"
    """A dimension of k and v with stride 0."""
    v_pad: int | None = None
    """Not None: v alone is in the other of `bhsd` and `bshd`, with this many unused elements as `row_pad`."""
    stray_strides: bool = False
    """Dimensions of one element have a stride that means nothing, as PyTorch allows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheCase:
    """Keys and values in a cache, in which every row that is no sequence's own is NaN.

    `Case.seq_kv` is the most keys that a sequence may have, `Case.layout` that of q.
    """

    lengths: tuple[int, ...]
    """Keys of each sequence."""
    queries: tuple[int, ...] | None = None
    """Queries of each sequence, one after another: `Case.seq_q` is the rows of all, and perhaps some behind the last,
    which nobody reads or writes. None: each sequence has `Case.seq_q`."""
    page: int | None = None
    """Keys of a page; None: each sequence has an entry of its own."""
    order: Literal["nhd", "hnd"] = "nhd"
    """Keys and heads of a page, or of an entry, as they are in memory."""
    joint: Literal["none", "entries", "rows", "latent"] = "none"
    """K and V are views of one tensor: the halves of each entry, or of each row; or V is the first columns of K."""
    offset: int = 0
    """Elements between a 16-byte boundary and the first element."""
    row_pad: int = 0
    """Unused elements after each row of D."""
    shared: int = 0
    """Leading pages that the second sequence shares with the first."""
    slack: int = 0
    """Pages that no sequence has."""
    freed: bool = False
    """Nor are keys before a window a sequence's own: entries of pages that have no others name none."""
    room: int = 0
    """How much more than the most queries `max_seqlen_q` is."""
    splits: int | None = None
    """The parts that the caller has the keys divided into."""
    tree: Literal["none", "bool", "scores"] = "none"
    """A bias of the last keys, as many as there are queries: each of these drafted tokens sees its ancestors alone. Of
    bools, or of numbers, -inf where they hide."""
    stored: Stored | None = None
    """Keys and values are 8-bit numbers, with scales."""
    scales: tuple[Scales, Scales] = ("head", "head")
    """Scales of stored keys, and of values."""

    def owned(self, case: Case) -> list[range]:
        """The keys of each sequence that it may read."""
        if not self.freed or case.window is None or case.window[0] is None:
            return [*map(range, self.lengths)]
        left, queries = case.window[0], self.queries or (case.seq_q,) * len(self.lengths)
        return [range(max(it - count - left, 0), it) for it, count in zip(self.lengths, queries, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One problem with its layout and values, and why it is worth its time. `scale` None is 1/sqrt(D)."""

    name: str
    why: str
    batch: int = 1
    heads_q: int = 2
    heads_kv: int = 2
    seq_q: int = 113
    seq_kv: int = 203
    head_dim: int = 64
    head_dim_v: int | None = None
    """The width of v and out; None is head_dim."""
    dtype: DType = "bf16"
    causal: bool = False
    window: Window | None = None
    scale: float | None = None
    softcap: float | None = None
    alibi: Literal["none", "heads", "batch"] = "none"
    """Slopes ``[Hq]`` or ``[B, Hq]``."""
    bias: str | None = None
    """The dimensions of a bias that are not broadcast, of ``bhqk``."""
    wide_bias: bool = False
    """It is fp32, not of the dtype of q."""
    bias_hides: bool = False
    """A sixth of it is -inf."""
    score_mod: str | None = None
    """A name in `parity.callables`."""
    mask_mod: str | None = None
    """A name in `parity.callables`, of which a block mask is made."""
    blocks: tuple[int, int] = (128, 128)
    """Queries and keys of a block."""
    lists: str = "bh"
    """The dimensions of the lists of blocks that are not broadcast, of ``bh``."""
    loose_lists: bool = False
    """Lists as callers may write them: in another order, in more room, with no block behind the last; and where nothing
    hides a part of a block, those that an end cuts are full."""
    deterministic: bool = False
    """Gradients of captured tensors are added up in a fixed order."""
    sinks: Sinks = "none"
    packed: tuple[tuple[int, int], ...] | None = None
    """Queries and keys of each sequence of a packed batch: `seq_q` and `seq_kv` are the rows of all, and perhaps some
    behind the last, which are NaN."""
    cache: CacheCase | None = None
    """Keys and values in a cache. With packed queries `batch` is 1."""
    layout: Memory = Memory()
    values: Values = "normal"
    size: Size = "any"
    nightly: bool = False
    """On a CPU it is run at night only: another case has nearly the same kernels, but for an expression that
    `tests/test_score_languages.py` runs by itself."""

    @property
    def seed(self) -> int:
        """A number that is the same on every machine, in every process and whatever other cases there are."""
        return zlib.crc32(self.name.encode())

    @property
    def lengths(self) -> tuple[int, int, int]:
        """The number of batch entries or sequences, and the most queries and keys of one."""
        if self.cache is not None:
            return len(self.cache.lengths), self.most_queries, self.seq_kv
        if self.packed is None:
            return self.batch, self.seq_q, self.seq_kv
        return len(self.packed), max(it[0] for it in self.packed), max(it[1] for it in self.packed)

    @property
    def most_queries(self) -> int:
        """The most queries of a sequence, of a batch that is not packed or with a cache."""
        packed = None if self.cache is None else self.cache.queries
        return self.seq_q if packed is None else max(packed, default=0)

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Queries and keys of each sequence."""
        if self.cache is not None:
            queries = self.cache.queries or (self.seq_q,) * self.batch
            return tuple(zip(queries, self.cache.lengths, strict=True))
        return self.packed or ((self.seq_q, self.seq_kv),) * self.batch

    @property
    def has_dlse(self) -> bool:
        """True if backward gets a gradient of lse, too: about every second case, by the seed."""
        return self.seed % 2 == 0

    @property
    def width_v(self) -> int:
        """The width of v and out."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def widths(self) -> str:
        """``D=128``, or ``D=192 Dv=128`` where v has a width of its own."""
        return widths(self.head_dim, self.width_v)

    @property
    def turn(self) -> int:
        """Whose turn it is, modulo how many take turns on the cases: bits of the seed that nothing else hangs on."""
        return self.seed >> 16

    @property
    def no_backward(self) -> str:
        """Why this case is of forward only; empty where it is not."""
        if self.cache is not None:
            return "cache: fmha_kvcache has no gradient"
        if self.values in PLANTED:
            return f"values {self.values}: backward does not keep apart NaN and inf that are values of its inputs"
        if (width := max(self.head_dim, self.width_v)) > BACKWARD_HEAD_DIM_MAX:
            return f"head_dim {width}: no backend has a backward above {BACKWARD_HEAD_DIM_MAX}"
        return ""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of q, k, v and out."""
        return torch.float16 if self.dtype == "fp16" else torch.bfloat16

    def __str__(self) -> str:
        return self.name
