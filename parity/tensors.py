"""A case's tensors: inputs that are views inside NaN-filled memory, and NaN-filled outputs between guards.

So whatever a kernel reads beyond a tensor, leaves unwritten or writes beside its outputs shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from multiattn.block_mask import BlockLists
from multiattn.layout import Strides
from multiattn.problem import Problem
from multiattn.score import BoundScore
from multiattn.sequences import Batching, Indices
from parity.cache_tensors import draw_cache
from parity.case import Case, Memory
from parity.memory import GUARD, POISON, Values3, generator_of, poisoned, poisoned_view
from parity.score_tensors import asked_of, modified
from parity.tolerance import Cached, Packed, indices_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """Tensors that a kernel must not write: the memory they lie in, as bits, and a copy of it."""

    memory: tuple[torch.Tensor, ...]
    memory_before: tuple[torch.Tensor, ...]

    @property
    def were_written(self) -> bool:
        """True if any bit of them, or of the memory around them, has changed."""
        pairs = zip(self.memory, self.memory_before, strict=True)
        return not all(torch.equal(now, before) for now, before in pairs)

    def restore(self) -> None:
        """Undo what was written, so that the next backend is not blamed for it."""
        for now, before in zip(self.memory, self.memory_before, strict=True):
            now.copy_(before)


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs(Watched):
    """q ``[B, Hq, Sq, D]``, k and v ``[B, Hkv, Skv, D]`` of a case, and its sinks ``[Hq]`` or None."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None = None
    score: BoundScore | None = None
    slots: tuple[int, ...] = ()
    """Slots of the tensors that `score` captures that want a gradient."""
    blocks: BlockLists | None = None
    packed: Packed | None = None
    cached: Cached | None = None

    @property
    def captured(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the modification of scores loads from."""
        return () if self.score is None else self.score.tensors

    @property
    def indices(self) -> Indices:
        """The lists of a block mask, and what says where sequences are."""
        return indices_of(self.blocks, self.packed, self.cached)

    @classmethod
    def of(cls, case: Case, device: torch.device) -> Inputs:
        """The inputs of `case` on `device`; the same for every call."""
        memory, (q, k, v), cached = _qkv(case, device)
        sinks = None
        if case.sinks != "none":
            sinks_memory = poisoned(case.heads_q, torch.float32, device)
            sinks = sinks_memory[GUARD:-GUARD]
            sinks.copy_(_draw_sinks(case))
            memory = (*memory, sinks_memory)
        asked, packed = asked_of(case, device), _packed_of(case, device)
        score, blocks = modified(case, asked, q, k, packed)
        slots = () if score is None or cached is not None else score.slots_requiring_grad
        if score is not None:
            score = score._replace(tensors=tuple(it.detach() for it in score.tensors))
        bits, copies = _watch((*memory, *asked.memory))
        return cls(
            q=q, k=k, v=v, sinks=sinks, score=score, slots=slots, blocks=blocks, packed=packed,
            cached=cached, memory=bits, memory_before=copies,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """out, in the strides that the Problem asks for, and lse ``[B, Hq, Sq]``, both poisoned, with their memory."""

    out: torch.Tensor
    lse: torch.Tensor
    memory: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, problem: Problem, device: torch.device) -> Outputs:
        """Fresh outputs for a problem."""
        shape = (problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v)
        out_memory, out = _poisoned_output(shape, problem.strides_out, problem.torch_dtype, device)
        lse_memory, lse = _poisoned_rows(shape, device)
        return cls(out=out, lse=lse, memory=(out_memory, lse_memory))

    @property
    def all(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse."""
        return self.out, self.lse

    @property
    def guards_were_written(self) -> bool:
        """True if anything was written just before or after out or lse."""
        return _guards_were_written(self.memory)


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved(Watched):
    """out and lse of a forward, which a backward reads."""

    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def of(cls, outputs: Outputs) -> Saved:
        """The results of a forward, where it wrote them."""
        bits, copies = _watch(outputs.memory)
        return cls(out=outputs.out, lse=outputs.lse, memory=bits, memory_before=copies)


@dataclass(frozen=True, kw_only=True, slots=True)
class Upstream(Watched):
    """dout, in the strides of out, and dlse ``[B, Hq, Sq]`` or None: what a backward is given."""

    dout: torch.Tensor
    dlse: torch.Tensor | None

    @classmethod
    def of(cls, case: Case, problem: Problem, device: torch.device) -> Upstream:
        """The inputs of `case`, drawn by its seed; the same for every call."""
        shape = (problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v)
        generator = generator_of(case.seed + 1, torch.Size(shape).numel(), device)
        dout_memory, dout = _poisoned_output(shape, problem.strides_out, problem.torch_dtype, device)
        dout.copy_(torch.randn(shape, generator=generator, device=generator.device))
        behind = slice(shape[2] if case.packed is None else sum(it[0] for it in case.packed), None)
        dout[:, :, behind] = torch.nan
        memory, dlse = [dout_memory], None
        if case.has_dlse:
            dlse_memory, dlse = _poisoned_rows(shape, device)
            dlse.copy_(torch.randn(shape[:3], generator=generator, device=generator.device))
            dlse[:, :, behind] = torch.nan
            memory.append(dlse_memory)
        bits, copies = _watch(memory)
        return cls(dout=dout, dlse=dlse, memory=bits, memory_before=copies)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradients:
    """dq, dk and dv, in the strides that the Problem asks for, all poisoned, with their memory.

    With sinks also delta, which a backward writes, and dsinks, which is computed of it; so `sums` and dcaptured where
    captured tensors want a gradient.
    """

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    memory: tuple[torch.Tensor, ...]
    delta: torch.Tensor | None = None
    dsinks: torch.Tensor | None = None
    sums: tuple[torch.Tensor, ...] = ()
    dcaptured: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(cls, problem: Problem, device: torch.device) -> Gradients:
        """Fresh gradients for a problem."""
        shape_q = (problem.batch, problem.heads_q, problem.seq_q, problem.head_dim)
        rows_kv = (problem.batch, problem.heads_kv, problem.seq_kv)
        memory, (dq, dk, dv) = zip(
            *(
                _poisoned_output(shape, strides, problem.torch_dtype, device)
                for shape, strides in (
                    (shape_q, problem.strides_dq),
                    ((*rows_kv, problem.head_dim), problem.strides_dk),
                    ((*rows_kv, problem.head_dim_v), problem.strides_dv),
                )
            ),
            strict=True,
        )
        delta, sums = None, []
        if problem.has_sinks:
            delta_memory, delta = _poisoned_rows(shape_q, device)
            memory = (*memory, delta_memory)
        for layout in problem.score.gradient_layouts.values() if problem.score is not None else ():
            around = poisoned(torch.Size(layout.shape).numel(), layout.dtype, device)
            sums.append(around[GUARD:-GUARD].view(layout.shape).zero_())
            memory = (*memory, around)
        return cls(dq=dq, dk=dk, dv=dv, memory=memory, delta=delta, sums=tuple(sums))

    @property
    def of_qkv(self) -> Values3:
        """dq, dk and dv."""
        return self.dq, self.dk, self.dv

    @property
    def all(self) -> tuple[torch.Tensor, ...]:
        """All gradients: dsinks where there are sinks, and the gradients of captured tensors."""
        of_sinks = () if self.dsinks is None else (self.dsinks,)
        return (*self.of_qkv, *of_sinks, *self.dcaptured)

    @property
    def guards_were_written(self) -> bool:
        """True if anything was written just before or after one of them."""
        return _guards_were_written(self.memory)


def _poisoned_output(
    shape: tuple[int, int, int, int], strides: Strides, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned memory and the view of `shape` in it, dense and aligned as an output is."""
    memory = poisoned(torch.Size(shape).numel(), dtype, device)
    return memory, memory.as_strided(shape, (*strides, 1), GUARD)


def _poisoned_rows(shape: tuple[int, int, int, int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned memory and the fp32 ``[B, H, S]`` in it."""
    memory = poisoned(torch.Size(shape[:3]).numel(), torch.float32, device)
    return memory, memory[GUARD:-GUARD].view(shape[:3])


def _guards_were_written(memories: Sequence[torch.Tensor]) -> bool:
    guards = (part.view(torch.int16) for memory in memories for part in (memory[:GUARD], memory[-GUARD:]))
    return not all(bool((guard == POISON).all()) for guard in guards)


def _watch(memories: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Memory as bits, in which NaN equals NaN, and a copy of each."""
    bits = tuple(memory.view(torch.int16) for memory in memories)
    return bits, tuple(memory.clone() for memory in bits)


def _shapes(case: Case) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """Shapes of q, k and v in memory: a dimension that is broadcast has one element."""
    batch_kv = 1 if case.layout.broadcast == "batch" else case.batch
    heads_kv = 1 if case.layout.broadcast == "heads" else case.heads_kv
    rows_kv = (batch_kv, heads_kv, case.seq_kv)
    return (case.batch, case.heads_q, case.seq_q, case.head_dim), (*rows_kv, case.head_dim), (*rows_kv, case.width_v)


def _layout_of_v(layout: Memory) -> Memory:
    """The layout of v, which is that of q and k but where `v_pad` says otherwise."""
    if layout.v_pad is None:
        return layout
    return replace(layout, order="bhsd" if layout.order == "bshd" else "bshd", row_pad=layout.v_pad)


def _qkv(case: Case, device: torch.device) -> tuple[tuple[torch.Tensor, ...], Values3, Cached | None]:
    """The memory of q, k and v, and these; of a cache also where its keys are."""
    if case.cache is not None:
        return draw_cache(case, case.cache, device)
    if case.layout.order == "packed":
        memory, views = _packed_views(case, device)
    else:
        layouts = (case.layout, case.layout, _layout_of_v(case.layout))
        memory, views = zip(
            *(
                poisoned_view(case.torch_dtype, layout, shape, device)
                for layout, shape in zip(layouts, _shapes(case), strict=True)
            ),
            strict=True,
        )
    for view, value in zip(views, _draw(case, device), strict=True):
        view.copy_(value)
    q, k, v = views
    if case.layout.broadcast != "none":
        k, v = (tensor.expand(case.batch, case.heads_kv, -1, -1) for tensor in (k, v))
    return memory, (q, k, v), None


def _packed_views(case: Case, device: torch.device) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    if case.seq_q != case.seq_kv:
        raise ValueError(f"{case.name}: packed q, k and v share one sequence; got {case.seq_q} and {case.seq_kv}")
    if case.width_v != case.head_dim:
        raise ValueError(f"{case.name}: packed q, k and v share one width; got {case.head_dim} and {case.width_v}")
    heads = (case.heads_q, case.heads_kv, case.heads_kv)
    shape = (case.batch, case.seq_q, sum(heads), case.head_dim)
    memory = poisoned(shape[0] * shape[1] * shape[2] * shape[3], case.torch_dtype, device)
    packed = memory[GUARD:-GUARD].view(shape).transpose(1, 2)  # [B, Hq + 2 * Hkv, S, D]
    return (memory,), torch.split(packed, list(heads), dim=1)


def _draw(case: Case, device: torch.device) -> Values3:
    """Values of q, k and v, fp32, before they are rounded to the case's dtype."""
    shapes = _shapes(case)
    generator = generator_of(case.seed, max(torch.Size(shape).numel() for shape in shapes), device)
    q, k, v = (torch.randn(tuple(shape), generator=generator, device=generator.device) for shape in shapes)
    if case.values == "large":
        q, k = _large(case, q), _large(case, k)
    elif case.values in ("ascending", "descending"):
        q, k = _ramp(case, q, k)
    elif case.values == "twin_peaks":
        q, k, v = _twin_peaks(case, q, k, v)
    elif case.values == "nan_neighbours":
        _plant_neighbours(case, q, k, v)
    elif case.values != "normal":
        _plant(case, q, k, v)
    if case.packed is not None:
        q[:, :, sum(it[0] for it in case.packed) :] = torch.nan
        k[:, :, sum(it[1] for it in case.packed) :] = torch.nan
        v[:, :, sum(it[1] for it in case.packed) :] = torch.nan
    return q, k, v


def _packed_of(case: Case, device: torch.device) -> Packed | None:
    """A case's sequences."""
    if case.packed is None:
        return None
    queries, keys = (
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
        for lengths in zip(*case.packed, strict=True)
    )
    asked = (case.softcap, case.bias, case.score_mod, case.mask_mod)
    is_scored = any(it is not None for it in asked) or case.alibi != "none"
    return Packed((queries, keys), Batching("packed", *case.lengths[1:] if is_scored else ()))


def _draw_sinks(case: Case) -> torch.Tensor:
    """A case's sinks ``[Hq]``, fp32."""
    sinks = torch.randn(case.heads_q, generator=torch.Generator().manual_seed(case.seed + 2))
    if case.sinks == "large":
        sinks += 8.0
    elif case.sinks == "some":
        sinks[0] = -torch.inf
    return sinks


def _large(case: Case, drawn: torch.Tensor) -> torch.Tensor:
    """Sparse entries of -m, 0 and m: any score is a small multiple of m * m, which 8 bits of mantissa hold.

    So the naive eager implementation makes no error of its own in scores, and what it allows stays small. For fp16
    m is such that its scores, which it holds in fp16, do not overflow either.
    """
    magnitude = 96.0 if case.dtype == "bf16" else 32.0
    return torch.sign(drawn) * (drawn.abs() > 1.0) * magnitude


def _ramp(case: Case, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores that rise or fall by 64 (scaled by 1/8: by 8) a key, each exact in 8 bits of mantissa."""
    q, k = q.clone(), torch.zeros_like(k)
    q[..., 0] = 64.0
    steps = torch.arange(case.seq_kv, dtype=k.dtype, device=k.device) - case.seq_kv // 2
    k[..., 0] = steps if case.values == "ascending" else -steps
    return q, k


def _twin_peaks(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Values3:
    """Scores of 0, and at two keys of 127.8 log2, exact in 8 bits of mantissa: the sum of two such weights is inf.

    The keys are of different threads of a warp, and point different ways in a column that no query has: so dq is not 0.
    v is so small that nothing but the sum overflows.
    """
    q, k = q.clone(), torch.zeros_like(k)
    middle = case.seq_kv // 2
    q[..., 0] = k[..., middle, :2] = k[..., middle + 2, 0] = 26.625
    q[..., 1], k[..., middle + 2, 1] = 0.0, -26.625
    return q, k, v / 32


def _plant_neighbours(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """NaN in every second sequence of a packed batch, all of it: the others must not notice."""
    assert case.packed is not None
    ends_q, ends_kv = ([*itertools.accumulate(lengths)] for lengths in zip(*case.packed, strict=True))
    for (len_q, len_kv), end_q, end_kv in [*zip(case.packed, ends_q, ends_kv, strict=True)][::2]:
        q[:, :, end_q - len_q : end_q] = torch.nan
        k[:, :, end_kv - len_kv : end_kv] = v[:, :, end_kv - len_kv : end_kv] = torch.nan


def _plant(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """NaN or inf in one or two rows of q, k or v, of one head only: the others must not notice."""
    key = case.seq_kv * 3 // 5
    if case.values == "nan_q":
        q[:, 0, case.seq_q // 2] = torch.nan
    elif case.values == "nan_k":
        k[:, 0, key] = torch.nan
    elif case.values == "inf_k":
        k[:, -1, key, 0] = torch.inf
    elif case.values == "inf_k_blocks":
        k[:, -1, :128, 0] = torch.inf  # +inf or -inf as a score, by the sign of q
    elif case.values == "nan_v":
        v[:, 0, key, ::3] = torch.nan
    elif case.values == "inf_v":
        v[:, 0, key, 1::3] = torch.inf
        v[:, 0, key + 7, 1::6] = -torch.inf  # where inf is, too: a row that sees both has NaN
        v[:, 0, key + 7, 2::3] = -torch.inf
