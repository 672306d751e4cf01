"""A call without its tensors: `Problem`, hashable, from which plans are made."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from multiattn.block_mask import LISTS, BlockSpec, ListArguments, list_arguments, list_shapes
from multiattn.layout import (
    DTYPE_NAMES,
    DTYPES,
    STORED,
    STORED_NAMES,
    VECTOR_BYTES,
    Layout,
    Shape,
    Strides,
    contiguous_strides,
    dense_strides,
    shape_of_out,
    strides_of,
    widths,
)
from multiattn.mask import Band, Window, band_of
from multiattn.operands import FORWARD_RESULTS, Operands, Options, ScoreSpec, score_spec
from multiattn.packed import packed_strides, strides_of_packed
from multiattn.score.expression import inputs_of, walk
from multiattn.score.serial import dumps
from multiattn.sequences import Batching
from multiattn.validate import LOG2_E, check_inputs, check_scale, check_shapes

SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One attention problem, hashable and free of tensors.

    Sizes are counts, strides are in elements, `alignment` is in bytes: the largest power of two up to 16
    that divides every base address and every stride of q, k and v.
    """

    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_kv: int
    head_dim: int
    head_dim_v: int
    """The width of v and of out."""
    dtype: str
    band: Band
    scale: float
    strides_q: Strides
    strides_k: Strides
    strides_v: Strides
    alignment: int = VECTOR_BYTES
    has_sinks: bool = False
    """Each query head has one more column, a logit without a value."""
    v_in_k: bool = False
    """v is a view of the first columns of k, row for row: a forward may read k alone. A backward may not, as hooks of
    saved tensors give it what they like."""
    row_max: bool = False
    """A forward also writes the largest score of each row."""
    score: ScoreSpec | None = None
    """The modification of every score."""
    blocks: BlockSpec | None = None
    lists: tuple[Shape, ...] = ()
    """The shapes of the lists of `blocks`, by their names there."""
    stored: str | None = None
    """The dtype of a cache of 8-bit numbers, of `STORED`; None: it is that of q."""
    batching: Batching | None = None
    """Sequences one after another, or keys and values in a cache; None for B entries of one length.

    Where queries are packed `batch` is 1, and `seq_q` are the rows of all; so are `seq_kv` of a packed batch. With a
    cache `seq_kv` is the most keys that a sequence may have."""

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool = False,
        window: Window | None = None,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> Problem:
        """Describe q ``[B, Hq, Sq, D]``, k ``[B, Hkv, Skv, D]``, v ``[B, Hkv, Skv, Dv]`` and sinks ``[Hq]``.

        Raises:
            TypeError, ValueError: An input is wrong for every backend; the message says what came and what is accepted.
                Each backend's capability refuses what only that backend cannot run.
        """
        return cls.of_operands(Operands(q, k, v, sinks=sinks), Options(*band_of(causal, window).window, scale))

    @classmethod
    def of_operands(cls, operands: Operands, options: Options) -> Problem:
        """The problem of the inputs among `operands`, with what `options` says of scores."""
        q, k, v = operands.qkv
        plain = cls.of_any(operands, options)
        strides_of_q = strides_of_packed if plain.has_packed_queries else strides_of
        strides_of_kv = strides_of if plain.packing is None else strides_of_packed
        strides_q, strides_k, strides_v = strides_of_q(q), strides_of_kv(k), strides_of_kv(v)
        addresses = [tensor.data_ptr() for tensor in (q, k, v)]
        if v_in_k := plain.stored is None and _is_v_in_k(k, v):
            strides_v = strides_k  # they may differ in dimensions of one element
        strides = zip((q, k, v), (strides_q, strides_k, strides_v), strict=True)
        offsets = [stride * tensor.element_size() for tensor, its in strides for stride in its]
        alignment = math.gcd(VECTOR_BYTES, *addresses, *offsets)
        return replace(
            plain,
            strides_q=strides_q,
            strides_k=strides_k,
            strides_v=strides_v,
            alignment=alignment,
            v_in_k=v_in_k,
        )

    @classmethod
    def of_any(cls, operands: Operands, options: Options) -> Problem:
        """The problem of contiguous tensors like these, which may have no memory, as under `torch.func`.

        Raises as `of`.
        """
        q, k, v = operands.qkv
        given, batching = operands.indices.named, options.batching
        if batching is None or batching.kind == "packed":
            check_inputs(q, k, v, operands.sinks)
        if batching is not None:  # whose tensors have been checked
            batching = batching.sized(k, {name: it for name, it in given.items() if name not in LISTS})
        batch, heads_q, seq_q, head_dim = q.shape
        seq_kv = k.shape[2]
        plain = cls.contiguous(
            batch=batch,
            heads_q=heads_q,
            heads_kv=k.shape[1],
            seq_q=seq_q,
            seq_kv=seq_kv if batching is None or batching.page is None else seq_kv * batching.max_pages,
            head_dim=head_dim,
            head_dim_v=v.shape[3],
            dtype=DTYPE_NAMES[q.dtype],
            band=options.band,
            scale=options.scale,
            has_sinks=operands.sinks is not None,
            row_max=options.row_max,
            batching=batching,
            stored=STORED_NAMES.get(k.dtype),
        )
        if options.score is not None:
            score = score_spec(operands.captured, q.device, options, plain.lengths, heads_q)
            plain = replace(plain, score=score)
        if options.blocks is None:
            return plain
        lists = {name: it for name, it in given.items() if name in LISTS}
        return replace(plain, blocks=options.blocks, lists=list_shapes(lists, options.blocks))

    @classmethod
    def contiguous(
        cls,
        *,
        batch: int,
        heads_q: int,
        seq_q: int,
        head_dim: int,
        head_dim_v: int | None = None,
        heads_kv: int | None = None,
        seq_kv: int | None = None,
        dtype: str = "bf16",
        causal: bool = False,
        window: Window | None = None,
        band: Band | None = None,
        scale: float | None = None,
        has_sinks: bool = False,
        v_in_k: bool = False,
        row_max: bool = False,
        batching: Batching | None = None,
        stored: str | None = None,
    ) -> Problem:
        """The problem of contiguous ``[B, H, S, D]`` tensors of these sizes, made without any tensor.

        `band` is a mask that is known to be one, in place of `causal` and `window`. Of a packed batch they are packed
        tensors, ``[1, H, T, D]``. With a cache k and v are one, contiguous, and `seq_kv` the most keys of a sequence.
        With `v_in_k` v is a view of the first columns of k.
        """
        heads_kv = heads_q if heads_kv is None else heads_kv
        seq_kv = seq_q if seq_kv is None else seq_kv
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        if dtype not in DTYPES:
            raise ValueError(f"dtype: got {dtype!r}; allowed {', '.join(DTYPES)}")
        shape_q, rows = (batch, heads_q, seq_q, head_dim), (batch, heads_kv, seq_kv)
        check_shapes(shape_q, (*rows, head_dim), (*rows, head_dim_v))
        if v_in_k and head_dim_v > head_dim:
            raise ValueError(f"head_dim_v: got {head_dim_v}; allowed up to the {head_dim} columns of k, with v in k")
        strides_q = contiguous_strides(shape_q)
        if batching is not None:
            if batching.kind == "packed" and batch != 1:
                raise ValueError(f"batch: got {batch}; allowed 1 in a packed batch, whose sequences are in `batching`")
            strides_q = packed_strides(heads_q, head_dim) if batching.has_packed_queries else strides_q

        def strides_of_kv(width: int) -> Strides:
            if batching is None:
                return contiguous_strides((*rows, width))
            if batching.kind == "packed":
                return packed_strides(heads_kv, width)
            return contiguous_strides(batching.cache_shape(heads_kv, seq_kv, width))

        row_v = head_dim if v_in_k else head_dim_v
        return cls(
            batch=batch,
            heads_q=heads_q,
            heads_kv=heads_kv,
            seq_q=seq_q,
            seq_kv=seq_kv,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=dtype,
            band=band_of(causal, window) if band is None else band,
            scale=check_scale(scale, head_dim),
            strides_q=strides_q,
            strides_k=strides_of_kv(head_dim),
            strides_v=strides_of_kv(row_v),
            has_sinks=has_sinks,
            v_in_k=v_in_k,
            row_max=row_max,
            alignment=math.gcd(
                VECTOR_BYTES,
                *(row * (STORED[stored] if stored else DTYPES[dtype]).itemsize for row in (head_dim, row_v)),
            ),
            batching=batching,
            stored=stored,
        )

    @property
    def group(self) -> int:
        """Query heads that share one key/value head (1: MHA; Hq: MQA)."""
        return self.heads_q // self.heads_kv

    @property
    def rows(self) -> int:
        """Queries of all heads that share a key/value head, of one sequence at most: rows of its product with keys."""
        return self.queries * self.group

    @property
    def scale_sign(self) -> int:
        """1, -1 or 0: the sign of the scale goes into q, so that a row's maximum is the maximum of ``q @ k^T``.

        A scale that fp32 holds only as a subnormal number counts as zero: the kernels flush such numbers.
        """
        if self.has_score:
            return 1  # the expression has the scale
        if abs(self.scale) * LOG2_E < SMALLEST_NORMAL:
            return 0
        return 1 if self.scale > 0 else -1

    @property
    def scale_log2(self) -> float:
        """Positive factor from ``q @ k^T`` to scores in the log2 domain: ``|scale| * log2(e)``; any at sign 0.

        It is 1 where an expression makes these scores.
        """
        if self.has_score:
            return 1.0
        return abs(self.scale) * LOG2_E if self.scale_sign else LOG2_E

    @property
    def score_factor(self) -> float:
        """Factor, with its sign, from ``q @ k^T`` to scores in the log2 domain: a backward recomputes them with it."""
        return self.scale_sign * self.scale_log2

    @property
    def grad_factor(self) -> float:
        """Factor of dq and dk: the scale, or 0 where the kernels count it as zero."""
        return self.scale if self.scale_sign else 0.0

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of q, k, v and out."""
        return DTYPES[self.dtype]

    @property
    def cache_dtype(self) -> torch.dtype:
        """The dtype of k and v."""
        return self.torch_dtype if self.stored is None else STORED[self.stored]

    @property
    def widths(self) -> str:
        """``D=128``, or ``D=192 Dv=128`` where v has a width of its own."""
        return widths(self.head_dim, self.head_dim_v)

    @property
    def widths_in_names(self) -> str:
        """``d128``, or ``d192v128`` where v has a width of its own."""
        return f"d{self.head_dim}" + ("" if self.head_dim_v == self.head_dim else f"v{self.head_dim_v}")

    @property
    def width(self) -> int:
        """The wider of head_dim and head_dim_v."""
        return max(self.head_dim, self.head_dim_v)

    @property
    def mean_width(self) -> int:
        """The head_dim of the problem with one width whose forward has as many products."""
        return (self.head_dim + self.head_dim_v) // 2

    @property
    def forward_results(self) -> tuple[str, ...]:
        """Names of the operands that a forward writes."""
        return (*FORWARD_RESULTS, "row_max") if self.row_max else FORWARD_RESULTS

    def as_read_by(self, planned: Problem) -> Problem:
        """This problem for a plan of that one: a plan that does not know that v is in k reads v where it is."""
        return replace(self, v_in_k=self.v_in_k and planned.v_in_k)

    @property
    def shape_q(self) -> Shape:
        """The shape of q, and of dq."""
        return self.batch, self.heads_q, self.seq_q, self.head_dim

    @property
    def strides_out(self) -> Strides:
        """Strides of out and dout: in q's order where q is dense ``[B, S, H, D]`` memory, else of a contiguous tensor.

        So a layer that passes a transposed view gets one back, and reshaping the heads away costs no copy.
        """
        if self.batching is not None and self.batching.strides_out is not None:
            return self.batching.strides_out
        return self._strides_like_q(self.head_dim_v)

    @property
    def strides_dq(self) -> Strides:
        """Strides of dq, found from q as those of out are."""
        return self._strides_like_q(self.head_dim)

    @property
    def strides_dk(self) -> Strides:
        """Strides of dk, found from k as those of out are from q."""
        return self._strides_like_kv(self.strides_k, self.head_dim)

    @property
    def strides_dv(self) -> Strides:
        """Strides of dv, found from v as those of dk are from k."""
        return self._strides_like_kv(self.strides_v, self.head_dim_v)

    def _strides_like_q(self, width: int) -> Strides:
        if self.has_packed_queries:
            return packed_strides(self.heads_q, width)
        return dense_strides(self.strides_q, self.shape_q, width)

    def _strides_like_kv(self, strides: Strides, width: int) -> Strides:
        if self.packing is not None:
            return packed_strides(self.heads_kv, width)
        return dense_strides(strides, (self.batch, self.heads_kv, self.seq_kv, width), width)

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """Every tensor of a launch by its name in `Operands`, and the areas of a backward's workspace.

        Those are contiguous: fp32 ``delta`` ``[B, Hq, Sq]`` and ``dq_sum`` ``[B, Hq, Sq, D]``, and the `TILE_LISTS`.
        """
        return _layouts_of(self)

    @property
    def packing(self) -> Batching | None:
        """The `batching` of a packed batch."""
        return self.batching if self.batching is not None and self.batching.kind == "packed" else None

    @property
    def cache(self) -> Batching | None:
        """The `batching` of keys and values in a cache."""
        return None if self.batching is None or self.batching.kind == "packed" else self.batching

    @property
    def sequences(self) -> int:
        """How many there are."""
        return self.batch if self.batching is None else self.batching.sequences

    @property
    def lengths(self) -> tuple[int, int, int]:
        """The number of sequences, and the most queries and keys that one has: in a packed batch, perhaps 0."""
        if self.packing is not None:
            return self.sequences, self.packing.max_q or 0, self.packing.max_kv or 0
        return self.sequences, self.queries, self.seq_kv

    @property
    def has_packed_queries(self) -> bool:
        """True if q, and what is like it, is ``[1, Hq, T, D]`` of sequences one after another."""
        return self.batching is not None and self.batching.has_packed_queries

    @property
    def queries(self) -> int:
        """The most queries of a sequence, of a batch that is not packed or with a cache."""
        return self.seq_q if self.cache is None or self.cache.max_q is None else self.cache.max_q

    @property
    def asked_splits(self) -> int | None:
        """The parts that a caller has the keys divided into: then no number but the rows of a sequence may choose
        tiles."""
        return None if self.batching is None else self.batching.splits

    @property
    def cache_tensors(self) -> tuple[str, ...]:
        """The operands that say where a cache has keys and packed queries."""
        return () if self.cache is None else self.cache.names

    def lists_of(self, names: Sequence[str]) -> ListArguments:
        """The lists of blocks called `names`, `KEYS_OF_QUERIES` or `QUERIES_OF_KEYS`, as a kernel takes them."""
        assert self.blocks is not None
        shapes = dict(zip(self.blocks.names, self.lists, strict=True))
        return list_arguments(shapes, [name for name in names if name in shapes])

    @property
    def is_banded(self) -> bool:
        """True if the mask hides keys: tiles of queries then see different ones of them."""
        return self.band.hides_keys

    @property
    def has_score(self) -> bool:
        """True if an expression modifies scores."""
        return self.score is not None and self.score.program.score is not None

    @property
    def has_tail(self) -> bool:
        """True if a mask hides some of the last keys of a cache: the tiles of keys before them do not need it."""
        return self.score is not None and self.score.program.tail is not None

    @property
    def reads_keys(self) -> bool:
        """True if the expression of scores reads an element of a tensor for each key."""
        if self.score is None or (root := self.score.program.score) is None:
            return False
        return any(it.op == "load" and "kv" in inputs_of(it) for it in walk(root))

    @property
    def is_two_sided(self) -> bool:
        """True if a kernel needs both bounds of the mask (`reach`); a causal one only knows the diagonal."""
        return self.band.is_two_sided

    @property
    def fits_tensor_maps(self) -> bool:
        """True if tensor maps of whole sequences hold q, k and v: multiples of 16 bytes, and no dimension broadcast.

        A map knows one length: a tile at the end of a packed sequence would have rows of the next one.
        """
        strides = (*self.strides_q, *self.strides_k, *self.strides_v)
        return self.packing is None and self.alignment == VECTOR_BYTES and 0 not in strides

    @property
    def mask(self) -> str:
        """The name of the mask: ``full``, ``causal`` or ``window:1024:0``."""
        return str(self.band)

    @property
    def reach(self) -> tuple[int, int]:
        """Keys before and after its own that a query sees: at most those that hide no key."""
        return self.band.reach(self.queries, self.seq_kv)

    @property
    def diagonal(self) -> int:
        """Bottom-right alignment: the key that is level with query i is ``i + diagonal``, ``Skv - Sq``."""
        return self.seq_kv - self.seq_q

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to launch for: no query at all."""
        has_none = self.cache is not None and (self.sequences == 0 or self.queries == 0)
        return self.batch == 0 or self.seq_q == 0 or has_none

    @property
    def has_no_keys(self) -> bool:
        """True if no sequence can have a key: every row is empty."""
        return self.seq_kv == 0 or (self.cache is not None and self.cache.entries == 0)

    @property
    def has_empty_rows(self) -> bool:
        """True if there are queries that see no key, or may be: by a block mask, or a score of -inf."""
        if self.batching is not None:
            return True
        by_band = self.seq_q > 0 and (self.seq_kv == 0 or self.diagonal + self.reach[1] < 0)
        return by_band or self.score is not None or self.blocks is not None

    @property
    def visible_pairs(self) -> int:
        """Visible (query, key) pairs of one head of one batch entry.

        For a packed batch they are those of sequences of equal lengths, because nobody knows the lengths here. For a
        cache they are those of a full one.
        """
        if not self.has_packed_queries:
            return self.band.count_pairs(self.seq_q, self.seq_kv)
        sequences = max(self.sequences, 1)
        keys = self.seq_kv if self.packing is None else self.seq_kv // sequences
        return sequences * self.band.count_pairs(self.seq_q // sequences, keys)

    @property
    def features(self) -> str:
        """Features beside the mask, each with a space before it: ``" sinks score=7c3b3fcc"``."""
        told = f"{' v in k' * self.v_in_k}{'' if self.stored is None else f' stored={self.stored}'}"
        told += f"{' sinks' * self.has_sinks}{' row max' * self.row_max}"
        told += f" score={self.score.program.digest[:8]}" if self.score is not None else ""
        told += f" blocks={self.blocks.queries}x{self.blocks.keys}" if self.blocks is not None else ""
        return told + (f" cache: {self.cache}" if self.cache is not None else "")

    def __str__(self) -> str:
        is_packed = self.has_packed_queries
        q, kv = "T" if is_packed else "S", "T" if self.packing is not None else "S"
        batch = f"{'packed ' if is_packed else ''}B={self.sequences if is_packed else self.batch}"
        heads, lengths = f"Hq={self.heads_q} Hkv={self.heads_kv}", f"{q}q={self.seq_q} {kv}kv={self.seq_kv}"
        return f"{batch} {heads} {lengths} {self.widths} {self.dtype} {self.mask}{self.features}"


def _is_v_in_k(k: torch.Tensor, v: torch.Tensor) -> bool:
    """True if each row of v is the beginning of the row of k at the same place."""
    if k.data_ptr() != v.data_ptr() or not v.data_ptr() or v.shape[3] > k.shape[3]:
        return False
    dimensions = zip(k.shape[:3], k.stride(), v.stride(), strict=False)
    return all(size == 1 or of_k == of_v for size, of_k, of_v in dimensions)


@functools.lru_cache(maxsize=64)
def _layouts_of(problem: Problem) -> Mapping[str, Layout]:
    """`Problem.layouts`. Making a new shape ready asks for them up to 50 times."""
    shape_q = problem.shape_q
    shape_k, shape_v = (
        (problem.batch, problem.heads_kv, problem.seq_kv, width)
        if problem.cache is None
        else problem.cache.cache_shape(problem.heads_kv, problem.seq_kv, width)
        for width in (problem.head_dim, problem.head_dim_v)
    )
    shape_out = shape_of_out(shape_q, shape_v)
    of_qkv = {
        "q": (shape_q, problem.strides_q),
        "k": (shape_k, problem.strides_k),
        "v": (shape_v, problem.strides_v),
        "out": (shape_out, problem.strides_out),
        "dout": (shape_out, problem.strides_out),
        "dq": (shape_q, problem.strides_dq),
        "dk": (shape_k, problem.strides_dk),
        "dv": (shape_v, problem.strides_dv),
    }
    row = max(problem.seq_q, 1)
    sums = contiguous_strides(shape_q)
    of_rows = Layout(shape_q[:3], (problem.heads_q * row, row, 1), torch.float32)
    return MappingProxyType(
        {
            **{name: Layout(shape, (*strides, 1), problem.torch_dtype) for name, (shape, strides) in of_qkv.items()},
            **{name: Layout(of_qkv[name][0], (*of_qkv[name][1], 1), problem.cache_dtype) for name in ("k", "v")},
            **dict.fromkeys(("lse", "dlse", "delta", *(("row_max",) if problem.row_max else ())), of_rows),
            "dq_sum": Layout(shape_q, (*sums, 1), torch.float32),
            **({"sinks": Layout((problem.heads_q,), (1,), torch.float32)} if problem.has_sinks else {}),
            **({} if problem.score is None else {**problem.score.layouts, **problem.score.gradient_layouts}),
            **({} if problem.blocks is None else problem.blocks.layouts(problem.lists)),
            **({} if problem.batching is None else problem.batching.tensors),
            **({} if problem.packing is None else problem.packing.tile_layouts(problem.seq_q, problem.seq_kv)),
        }
    )


def problem_of(operands: Operands, options: Options) -> Problem:
    """The problem of a call; TypeError or ValueError as `Problem.of`.

    A bound that hides no key is left out: a window wider than its sequence costs what no window does.
    """
    problem = Problem.of_operands(operands, options)
    if problem.cache is not None and problem.queries <= 1 and problem.band.right is not None:
        problem = replace(problem, band=Band(problem.band.left, None))  # the last query sees all keys up to the last
    if not problem.is_two_sided or problem.packing is not None:
        return problem
    return replace(problem, band=problem.band.within(problem.queries, problem.seq_kv))


def options_of(problem: Problem) -> Options:
    """Options that give this problem of tensors like its own."""
    score = problem.score
    plain = Options(
        *problem.band.window,
        problem.scale,
        problem.has_sinks,
        blocks=problem.blocks,
        batching=problem.batching,
        row_max=problem.row_max,
    )
    if score is None:
        return plain
    return plain._replace(
        score=dumps(score.program),
        scalars=score.scalars,
        gradient_slots=score.gradients,
        deterministic=score.scores is not None,
    )
