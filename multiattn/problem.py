"""A call without its tensors (`Problem`, `Options`), its tensors by name (`Operands`), and their only validation.

Layout everywhere is ``[B, H, S, D]`` (batch, heads, sequence, head_dim), any strides with unit stride on D.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling

from multiattn.block_mask import BlockSpec, read_block_mask
from multiattn.mask import Band, Window, band_of
from multiattn.score import BoundScore, LoweredScore, ScoreProgram, bind_score
from multiattn.score.serial import dumps, loads, named_text

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
)
"""Short names of the dtypes a Problem can carry; which of them a backend takes is its capability."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Strides = tuple[int, int, int]
"""Element strides of (batch, head, sequence); the stride of D is 1 by contract."""

Shape = tuple[int, ...]

ScoreMod = Callable[..., torch.Tensor]
"""FlexAttention's ``(score, b, h, q_idx, kv_idx) -> score``."""

LOG2_E = math.log2(math.e)
SCALE_MAX = 3.4028234663852886e38 / LOG2_E
"""The largest whose product with `LOG2_E`, which kernels take, fp32 can hold."""
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny

VECTOR_BYTES = 16
"""Widest access any kernel makes to global memory: cp.async, TMA and 128-bit loads all want this."""


class Options(NamedTuple):
    """The options of a call. A tuple, because it is made and hashed in every call."""

    left: int | None = None
    """With `right`, the bounds of the mask: a `multiattn.mask.Band`."""
    right: int | None = None
    scale: float | None = None
    has_sinks: bool = False
    score: str | None = None
    """The program that modifies every score, as `multiattn.score.serial` writes it; `scalars` are its numbers."""
    scalars: tuple[float, ...] = ()
    gradient_slots: tuple[int, ...] = ()
    """Slots of the captured tensors that want a gradient."""
    blocks: BlockSpec | None = None
    """A block mask; its lists come behind what the program captures."""
    backend: str = "auto"
    variant: str | None = None
    deterministic: bool = False

    @classmethod
    def of(
        cls,
        *,
        causal: bool,
        window: Window | None,
        scale: float | None,
        has_sinks: bool = False,
        backend: str,
        variant: str | None,
        deterministic: bool | None,
    ) -> Options:
        """Validate the types; TypeError, naming what came. Equal options ask for the same from here on.

        ``True == 1 == 1.0``, so an unchecked value would find the plan of another call. `deterministic` None follows
        `torch.use_deterministic_algorithms`.
        """
        left, right = None, 0 if causal else None
        if window is not None or type(causal) is not bool:
            band = band_of(causal, window)
            left, right = band.left, band.right
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        elif not isinstance(deterministic, bool):
            raise TypeError(f"deterministic must be a bool or None; got {type(deterministic).__name__}")
        if not isinstance(backend, str):
            raise TypeError(f"backend must be a string; got {type(backend).__name__}")
        if variant is not None and not isinstance(variant, str):
            raise TypeError(f"variant must be a string; got {type(variant).__name__}")
        if scale is not None and type(scale) is not float:
            scale = _as_float(scale)
        options = (left, right, scale, has_sinks, None, (), (), None, backend, variant, deterministic)
        return tuple.__new__(cls, options)  # what cls() does, in half the time

    def with_score(self, score: BoundScore | None) -> Options:
        """The same with a modification of every score."""
        if score is None:
            return self
        slots = score.slots_requiring_grad if torch.is_grad_enabled() else ()
        return self._replace(score=dumps(score.program), scalars=tuple(score.scalars.values()), gradient_slots=slots)

    @property
    def band(self) -> Band:
        """The mask."""
        return Band(self.left, self.right)

    @property
    def of_gradient(self) -> Options:
        """The options of the backward that autograd runs: `variant` names one of the forward's."""
        return self if self.variant is None else self._replace(variant=None)


class Operands(NamedTuple):
    """Every tensor of a launch, by name; None where a launch has none.

    q ``[B, Hq, Sq, D]``, k and v ``[B, Hkv, Skv, D]``; out, dout and dq like q; dk and dv like k and v; lse, dlse and
    delta fp32 ``[B, Hq, Sq]``; sinks ``[Hq]``, fp32 where a kernel reads it. A forward reads q, k, v and sinks, and
    writes out and lse; a backward reads all of these, dout and perhaps dlse, and writes dq, dk and dv, and delta where
    something is computed of it afterwards.

    An optional input stands behind the others: calls without any pay nothing for it. Autograd, planning and launching
    take `inputs` and `read` whole.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    dout: torch.Tensor | None = None
    dlse: torch.Tensor | None = None
    dq: torch.Tensor | None = None
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    delta: torch.Tensor | None = None
    captured: tuple[torch.Tensor, ...] = ()
    """The tensors that the modification of scores loads from, by slot, and then the lists of a block mask."""

    @classmethod
    def of_inputs(cls, inputs: Sequence[torch.Tensor], has_sinks: bool) -> Operands:
        """The operands of a forward of these `inputs`."""
        q, k, v, *rest = inputs
        sinks = rest.pop(0) if has_sinks else None
        return cls(q, k, v, sinks=sinks, captured=tuple(rest))

    @classmethod
    def of_read(cls, read: Sequence[torch.Tensor | None], has_sinks: bool) -> Operands:
        """The operands of a backward that reads these, as `read` has them."""
        *inputs, out, lse, dout, dlse = read
        given = cls.of_inputs(inputs, has_sinks)  # type: ignore[arg-type]  # an input is not None
        return given._replace(out=out, lse=lse, dout=dout, dlse=dlse)

    @classmethod
    def like(cls, layouts: Mapping[str, Layout], make: Callable[[Layout], torch.Tensor]) -> Operands:
        """Tensors of a problem, one of each of its `layouts` that is an operand."""
        named = {name: make(layouts[name]) for name in cls._fields if name in layouts}
        slots = itertools.takewhile(lambda name: name in layouts, map(captured_name, itertools.count()))
        return cls(**named, captured=tuple(make(layouts[name]) for name in slots))

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """Every tensor that there is, by its name."""
        *tensors, captured = self
        named = {name: it for name, it in zip(self._fields, tensors, strict=False) if it is not None}
        return named | {captured_name(slot): it for slot, it in enumerate(captured)}

    @property
    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v."""
        return self[:INPUTS]  # type: ignore[return-value]  # the rest may be None

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The tensors that a caller of the forward gives, in the order of their gradients."""
        if self.sinks is None:
            return (*self.qkv, *self.captured) if self.captured else self.qkv
        return (*self.qkv, self.sinks, *self.captured)

    @property
    def read(self) -> tuple[Any, ...]:
        """Every tensor that a backward reads: the inputs, out, lse, dout and dlse."""
        return (*self.inputs, self.out, self.lse, self.dout, self.dlse)

    def inputs_are(self, types: frozenset[type]) -> bool:
        """True if every input is of exactly one of these types, not of a subclass."""
        plain = type(self.q) in types and type(self.k) in types and type(self.v) in types
        return (
            plain and (self.sinks is None or type(self.sinks) in types) and types.issuperset(map(type, self.captured))
        )

    @property
    def requires_grad(self) -> bool:
        """True if a gradient of an input is wanted."""
        if self.q.requires_grad or self.k.requires_grad or self.v.requires_grad:
            return True
        return any(tensor.requires_grad for tensor in self.inputs[INPUTS:])


INPUTS = 3
"""How many operands every caller of a forward gives: q, k and v."""
READ = Operands._fields.index("dq")
"""How many every backward reads, dlse among them though it may be None."""
FORWARD_RESULTS, GRADIENTS = ("out", "lse"), ("dq", "dk", "dv")
"""Names of the operands that every forward and every backward write."""


class ScoreSpec(NamedTuple):
    """The modification of every score, its numbers, and what the tensors that it loads from look like."""

    program: ScoreProgram
    scalars: tuple[float, ...]
    """In the order of the program's own."""
    shapes: tuple[Shape, ...]
    """Of the captured tensors, by slot, as `strides` are, in elements."""
    strides: tuple[Shape, ...]
    gradients: tuple[int, ...] = ()
    """Slots of the tensors that want a gradient."""

    @property
    def numbers(self) -> Mapping[str, float]:
        """The numbers by their names."""
        return dict(zip(self.program.scalars, self.scalars, strict=True))

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """The captured tensors by their names among the operands of a launch."""
        captured = zip(self.shapes, self.strides, self.program.tensors, strict=True)
        return {captured_name(slot): Layout(*it[:2], it[2].dtype) for slot, it in enumerate(captured)}

    def arguments(self, lowered: LoweredScore, scale: float) -> Mapping[str, float | int | str]:
        """The value of each of `lowered.fields` by its name, in order: for a pointer the name of an operand."""
        derived = iter(lowered.derived_values(self.numbers, scale))
        found: dict[str, float | int | str] = {}
        for it in lowered.fields:
            if it.kind == "f32":
                found[it.name] = next(derived)
            elif it.kind == "pointer":
                found[it.name] = captured_name(it.slot)
            else:
                found[it.name] = (self.strides if it.kind == "stride" else self.shapes)[it.slot][it.axis]
        return found


CAPTURED = "captured"


def captured_name(slot: int) -> str:
    """The name of a captured tensor among the operands of a launch."""
    return f"{CAPTURED}{slot}"


class Layout(NamedTuple):
    """A tensor as the launch contract has it; strides in elements."""

    shape: Shape
    strides: Shape
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of a dense tensor of this shape."""
        return self.dtype.itemsize * math.prod(self.shape)


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
    dtype: str
    band: Band
    scale: float
    strides_q: Strides
    strides_k: Strides
    strides_v: Strides
    alignment: int = VECTOR_BYTES
    has_sinks: bool = False
    """Each query head has one more column, a logit without a value."""
    score: ScoreSpec | None = None
    """The modification of every score."""
    blocks: BlockSpec | None = None

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
        """Validate q ``[B, Hq, Sq, D]``, k and v ``[B, Hkv, Skv, D]``, sinks ``[Hq]`` and describe them.

        Raises TypeError or ValueError, naming what came and what is accepted, for whatever is wrong for
        every backend; what only some backends refuse is left to their capability.
        """
        return cls.of_operands(Operands(q, k, v, sinks=sinks), Options(*band_of(causal, window).window, scale))

    @classmethod
    def of_operands(cls, operands: Operands, options: Options) -> Problem:
        """The same of the inputs among `operands`, with what `options` says of scores."""
        q, k, v = operands.qkv
        plain = cls.of_any(operands, options)
        strides_q, strides_k, strides_v = map(_strides, (q, k, v))
        addresses = [tensor.data_ptr() for tensor in (q, k, v)]
        offsets = [stride * q.element_size() for stride in (*strides_q, *strides_k, *strides_v)]
        alignment = math.gcd(VECTOR_BYTES, *addresses, *offsets)
        return replace(plain, strides_q=strides_q, strides_k=strides_k, strides_v=strides_v, alignment=alignment)

    @classmethod
    def of_any(cls, operands: Operands, options: Options) -> Problem:
        """The problem of contiguous tensors like these, which may have no memory, as under `torch.func`.

        Raises as `of`.
        """
        q, k, v = operands.qkv
        check_inputs(q, k, v, operands.sinks)
        batch, heads_q, seq_q, head_dim = q.shape
        plain = cls.contiguous(
            batch=batch,
            heads_q=heads_q,
            heads_kv=k.shape[1],
            seq_q=seq_q,
            seq_kv=k.shape[2],
            head_dim=head_dim,
            dtype=_NAMES[q.dtype],
            band=options.band,
            scale=options.scale,
            has_sinks=operands.sinks is not None,
        )
        if options.score is not None:
            plain = replace(plain, score=_score_spec(operands, options, plain))
        return plain if options.blocks is None else replace(plain, blocks=options.blocks)

    @classmethod
    def contiguous(
        cls,
        *,
        batch: int,
        heads_q: int,
        seq_q: int,
        head_dim: int,
        heads_kv: int | None = None,
        seq_kv: int | None = None,
        dtype: str = "bf16",
        causal: bool = False,
        window: Window | None = None,
        band: Band | None = None,
        scale: float | None = None,
        has_sinks: bool = False,
    ) -> Problem:
        """The problem of contiguous ``[B, H, S, D]`` tensors of these sizes, made without any tensor.

        `band` is a mask that is known to be one, in place of `causal` and `window`.
        """
        heads_kv = heads_q if heads_kv is None else heads_kv
        seq_kv = seq_q if seq_kv is None else seq_kv
        if dtype not in DTYPES:
            raise ValueError(f"dtype: got {dtype!r}; allowed {', '.join(DTYPES)}")
        shape_q, shape_kv = (batch, heads_q, seq_q, head_dim), (batch, heads_kv, seq_kv, head_dim)
        _check_shapes(shape_q, shape_kv, shape_kv)
        strides_kv = _contiguous_strides(shape_kv)
        return cls(
            batch=batch,
            heads_q=heads_q,
            heads_kv=heads_kv,
            seq_q=seq_q,
            seq_kv=seq_kv,
            head_dim=head_dim,
            dtype=dtype,
            band=band_of(causal, window) if band is None else band,
            scale=check_scale(scale, head_dim),
            strides_q=_contiguous_strides(shape_q),
            strides_k=strides_kv,
            strides_v=strides_kv,
            has_sinks=has_sinks,
            alignment=math.gcd(VECTOR_BYTES, head_dim * DTYPES[dtype].itemsize),
        )

    @property
    def group(self) -> int:
        """Query heads that share one key/value head (1: MHA; Hq: MQA)."""
        return self.heads_q // self.heads_kv

    @property
    def scale_sign(self) -> int:
        """1, -1 or 0: the sign of the scale goes into q, so that a row's maximum is the maximum of ``q @ k^T``.

        A scale that fp32 holds only as a subnormal number counts as zero: the kernels flush such numbers.
        """
        if self.has_score:
            return 1  # the expression has the scale
        if abs(self.scale) * LOG2_E < _SMALLEST_NORMAL:
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
    def strides_out(self) -> Strides:
        """Strides of out: q's own where q is dense ``[B, S, H, D]`` memory, else those of a contiguous tensor.

        So a layer that passes a transposed view gets one back, and reshaping the heads away costs no copy.
        """
        return _dense_strides(self.strides_q, (self.batch, self.heads_q, self.seq_q, self.head_dim))

    @property
    def strides_dq(self) -> Strides:
        """Strides of dq, and of dout: those of out."""
        return self.strides_out

    @property
    def strides_dk(self) -> Strides:
        """Strides of dk: k's own where k is dense ``[B, S, H, D]`` memory, else those of a contiguous tensor."""
        return _dense_strides(self.strides_k, (self.batch, self.heads_kv, self.seq_kv, self.head_dim))

    @property
    def strides_dv(self) -> Strides:
        """Strides of dv, found from v as those of dk are from k."""
        return _dense_strides(self.strides_v, (self.batch, self.heads_kv, self.seq_kv, self.head_dim))

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """Every tensor of a launch by its name in `Operands`, and the areas of a backward's workspace.

        Those are fp32 and contiguous: ``delta`` ``[B, Hq, Sq]``, and ``dq_sum`` ``[B, Hq, Sq, D]``.
        """
        shape_q = (self.batch, self.heads_q, self.seq_q, self.head_dim)
        shape_kv = (self.batch, self.heads_kv, self.seq_kv, self.head_dim)
        like_q = {"q": self.strides_q} | dict.fromkeys(("out", "dout", "dq"), self.strides_out)
        like_kv = {"k": self.strides_k, "v": self.strides_v, "dk": self.strides_dk, "dv": self.strides_dv}
        row = max(self.seq_q, 1)
        sums = _contiguous_strides(shape_q)
        return {
            **{name: Layout(shape_q, (*strides, 1), self.torch_dtype) for name, strides in like_q.items()},
            **{name: Layout(shape_kv, (*strides, 1), self.torch_dtype) for name, strides in like_kv.items()},
            **dict.fromkeys(("lse", "dlse", "delta"), Layout(shape_q[:3], (self.heads_q * row, row, 1), torch.float32)),
            "dq_sum": Layout(shape_q, (*sums, 1), torch.float32),
            **({"sinks": Layout((self.heads_q,), (1,), torch.float32)} if self.has_sinks else {}),
            **({} if self.score is None else self.score.layouts),
        }

    @property
    def is_banded(self) -> bool:
        """True if the mask hides keys: tiles of queries then see different ones of them."""
        return self.band.hides_keys

    @property
    def has_score(self) -> bool:
        """True if an expression modifies scores."""
        return self.score is not None and self.score.program.score is not None

    @property
    def is_two_sided(self) -> bool:
        """True if a kernel needs both bounds of the mask (`reach`); a causal one only knows the diagonal."""
        return self.band.is_two_sided

    @property
    def mask(self) -> str:
        """The name of the mask: ``full``, ``causal`` or ``window:1024:0``."""
        return str(self.band)

    @property
    def reach(self) -> tuple[int, int]:
        """Keys before and after its own that a query sees: at most those that hide no key."""
        return self.band.reach(self.seq_q, self.seq_kv)

    @property
    def diagonal(self) -> int:
        """Bottom-right alignment: the key that is level with query i is ``i + diagonal``, ``Skv - Sq``."""
        return self.seq_kv - self.seq_q

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to launch for: no query at all."""
        return self.batch == 0 or self.seq_q == 0

    @property
    def has_empty_rows(self) -> bool:
        """True if there are queries that see no key."""
        return self.seq_q > 0 and (self.seq_kv == 0 or self.diagonal + self.reach[1] < 0)

    @property
    def visible_pairs(self) -> int:
        """(query, key) pairs that count, of one head of one batch entry; FLOP are ``4*B*Hq*D`` times this."""
        return self.band.count_pairs(self.seq_q, self.seq_kv)

    def __str__(self) -> str:
        heads, lengths = f"Hq={self.heads_q} Hkv={self.heads_kv}", f"Sq={self.seq_q} Skv={self.seq_kv}"
        more = " sinks" if self.has_sinks else ""
        more += f" score={self.score.program.digest[:8]}" if self.score is not None else ""
        more += f" blocks={self.blocks.queries}x{self.blocks.keys}" if self.blocks is not None else ""
        return f"B={self.batch} {heads} {lengths} D={self.head_dim} {self.dtype} {self.mask}{more}"


def problem_of(operands: Operands, options: Options) -> Problem:
    """The problem of a call; TypeError or ValueError as `Problem.of`.

    A bound that hides no key is left out: a window wider than its sequence costs what no window does.
    """
    problem = Problem.of_operands(operands, options)
    if not problem.is_two_sided:
        return problem
    return replace(problem, band=problem.band.within(problem.seq_q, problem.seq_kv))


def options_of(problem: Problem) -> Options:
    """Options that give this problem of tensors like its own."""
    score = problem.score
    plain = Options(*problem.band.window, problem.scale, problem.has_sinks, blocks=problem.blocks)
    if score is None:
        return plain
    return plain._replace(score=dumps(score.program), scalars=score.scalars, gradient_slots=score.gradients)


def strides_like(tensor: torch.Tensor) -> tuple[int, int, int, int]:
    """Strides of a result made after q, k or v ``[B, H, S, D]``: `Problem.strides_out` and its like, with that of D.

    Needs no address, so that it also answers for a fake tensor, with symbolic sizes.
    """
    return (*_dense_strides(_strides(tensor), tuple(tensor.shape)), 1)


def check_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None, *, strides: bool = True
) -> None:
    """TypeError or ValueError for tensors that are wrong for every backend; fake tensors are fine.

    Without `strides` those are not asked: a tensor that `torch.vmap` maps may be laid out anew before it runs.
    """
    _check_tensors(q, k, v)
    _check_shapes(tuple(q.shape), tuple(k.shape), tuple(v.shape))
    if strides:
        _check_strides(q, k, v)
    if sinks is not None:
        _check_sinks(sinks, q)


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    tensors = {"q": q, "k": k, "v": v}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor; got {type(tensor).__name__}")
        if tensor.is_nested or tensor.layout != torch.strided:
            got = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
            raise TypeError(f"{name} must be a dense strided tensor; got {got}")
        if tensor.is_neg():
            raise ValueError(f"{name} must hold its own values; got a negated view; call .resolve_neg() on it")
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name}.dtype: got {tensor.dtype}; allowed {', '.join(map(str, _NAMES))}")
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    if len(set(dtypes.values())) > 1:
        raise TypeError(f"q, k and v must share one dtype; got {_list(dtypes)}")
    devices = {name: tensor.device for name, tensor in tensors.items()}
    if len(set(devices.values())) > 1:
        raise ValueError(f"q, k and v must be on one device; got {_list(devices)}")
    if q.device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: got {q.device}; allowed cpu and cuda")


def _check_shapes(q: Shape, k: Shape, v: Shape) -> None:
    shapes = _list({"q": q, "k": k, "v": v})
    for name, shape in (("q", q), ("k", k), ("v", v)):
        if len(shape) != 4:
            raise ValueError(f"{name} must have rank 4, [B, H, S, D]; got rank {len(shape)} ({shapes})")
        if min(shape) < 0:
            raise ValueError(f"sizes must not be negative; got {shapes}")
    batch, heads_q, _, head_dim = q
    if k != v:
        raise ValueError(f"k and v must have one shape, [B, Hkv, Skv, D]; got {shapes}")
    if k[0] != batch:
        raise ValueError(f"q, k and v must share the batch size; got {shapes}")
    if k[3] != head_dim:
        raise ValueError(f"q, k and v must share head_dim; got {shapes}")
    heads_kv = k[1]
    if head_dim < 1 or heads_q < 1 or heads_kv < 1:
        raise ValueError(f"heads and head_dim must be at least 1; got {shapes}")
    if heads_q % heads_kv:
        raise ValueError(
            f"query heads must be a multiple of key/value heads (GQA); got Hq={heads_q}, Hkv={heads_kv} ({shapes})"
        )


def _check_strides(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.shape[3] > 1 and tensor.stride(3) != 1:
            raise ValueError(
                f"{name} must have unit stride on D; got strides {tuple(tensor.stride())} for shape "
                f"{tuple(tensor.shape)}; call .contiguous() on it"
            )


def _score_spec(operands: Operands, options: Options, problem: Problem) -> ScoreSpec:
    """The modification of a call; ValueError for captured tensors that are elsewhere, or too small."""
    assert options.score is not None
    program = loads(options.score)
    tensors = operands.captured[: len(program.tensors)]
    bound = BoundScore(program, dict(zip(program.scalars, options.scalars, strict=True)), tensors)
    for slot, tensor in enumerate(tensors):
        if tensor.device != operands.q.device:
            allowed = f"the device of q, {operands.q.device}"
            raise ValueError(f"{captured_name(slot)}: got a tensor on {tensor.device}; allowed {allowed}")
    bound.check(batch=problem.batch, heads=problem.heads_q, seq_q=problem.seq_q, seq_kv=problem.seq_kv)
    return ScoreSpec(
        program=program,
        scalars=options.scalars,
        shapes=tuple(tuple(it.shape) for it in tensors),
        strides=tuple(it.stride() for it in tensors),
        gradients=options.gradient_slots,
    )


def with_score(
    operands: Operands,
    options: Options,
    softcap: float | None,
    alibi_slopes: torch.Tensor | None,
    bias: torch.Tensor | None,
    score_mod: ScoreMod | None,
    block_mask: object = None,
) -> tuple[Operands, Options]:
    """The same with the modification of scores that a call asks for. TypeError or ValueError, naming what came.

    Dynamo can trace neither the checks nor `score_mod`; it gets the program of what has a name as a constant.
    """
    if softcap is None and alibi_slopes is None and bias is None and score_mod is None and block_mask is None:
        return operands, options
    if is_compiling():
        if score_mod is not None or block_mask is not None:
            raise NotImplementedError(
                "score_mod, block_mask: got one in torch.compile or torch.export; allowed in eager calls"
            )
        slopes = None if alibi_slopes is None else (alibi_slopes.dim(), _dtype_name(alibi_slopes))
        of_bias = None if bias is None else (tuple(size == 1 for size in bias.shape), _dtype_name(bias))
        text = named_text(softcap is not None, slopes, of_bias)
        captured = tuple(it for it in (alibi_slopes, bias) if it is not None)
        scalars = () if softcap is None else (softcap,)
        return operands._replace(captured=captured), options._replace(score=text, scalars=scalars)
    check_inputs(*operands.qkv, strides=False)
    _check_modification(operands.q, operands.k, softcap, alibi_slopes, bias, score_mod)
    lists, mask_mod = (None, None) if block_mask is None else read_block_mask(block_mask, operands.q, operands.k)
    score = bind_score(
        device=operands.q.device,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        bias=bias,
        score_mod=score_mod,
        mask_mod=mask_mod,
    )
    captured = () if score is None else score.tensors
    if lists is not None:
        captured, options = (*captured, *lists.tensors), options._replace(blocks=lists.spec)
    return operands._replace(captured=captured), options.with_score(score)


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _check_modification(
    q: torch.Tensor,
    k: torch.Tensor,
    softcap: float | None,
    alibi_slopes: torch.Tensor | None,
    bias: torch.Tensor | None,
    score_mod: object,
) -> None:
    """TypeError or ValueError for what modifies no scores; how the tensors fit sizes is checked with these."""
    if softcap is not None:
        cap = _as_float(softcap, "softcap")
        if not 0.0 < cap < math.inf:
            raise ValueError(f"softcap: got {cap}; allowed positive and finite numbers, or None")
    batch, heads = q.shape[0], q.shape[1]
    if alibi_slopes is not None:
        _check_captured("alibi_slopes", alibi_slopes, q, (torch.float32,))
        if tuple(alibi_slopes.shape) not in ((heads,), (batch, heads)):
            got, allowed = tuple(alibi_slopes.shape), f"({heads},) and ({batch}, {heads})"
            got, allowed = tuple(alibi_slopes.shape), f"({heads},) and ({batch}, {heads})"
            raise ValueError(f"alibi_slopes: got shape {got}; allowed {allowed}")
    if bias is not None:
        _check_captured("bias", bias, q, (q.dtype, torch.float32))
        sizes = (batch, heads, q.shape[2], k.shape[2])
        if bias.ndim != 4 or any(it not in (1, size) for it, size in zip(bias.shape, sizes, strict=True)):
            allowed = f"[B|1, Hq|1, Sq|1, Skv|1] with {sizes}"
            raise ValueError(f"bias: got shape {tuple(bias.shape)}; allowed {allowed}")
    if score_mod is not None and not callable(score_mod):
        raise TypeError(f"score_mod must be callable or None; got {type(score_mod).__name__}")


def _check_captured(name: str, tensor: object, q: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor or None; got {type(tensor).__name__}")
    if tensor.dtype not in dtypes or tensor.layout != torch.strided:
        allowed = " or ".join(map(str, dict.fromkeys(dtypes)))
        raise TypeError(f"{name}: got {tensor.dtype}, layout {tensor.layout}; allowed dense {allowed}")
    if tensor.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}; got {tensor.device}")


def _check_sinks(sinks: torch.Tensor, q: torch.Tensor) -> None:
    if not isinstance(sinks, torch.Tensor):
        raise TypeError(f"sinks must be a torch.Tensor or None; got {type(sinks).__name__}")
    if not sinks.is_floating_point() or sinks.layout != torch.strided:
        raise TypeError(f"sinks must be a dense floating-point tensor; got {sinks.dtype}, layout {sinks.layout}")
    if sinks.shape != q.shape[1:2]:
        allowed = f"[{q.shape[1]}], one for each head of q"
        raise ValueError(f"sinks: got shape {list(sinks.shape)}; allowed {allowed}")
    if sinks.device != q.device:
        raise ValueError(f"sinks must be on the device of q, {q.device}; got {sinks.device}")


def check_scale(scale: float | None, head_dim: int) -> float:
    """The scale as a float, None its default; TypeError or ValueError for what fp32 has no finite number for."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    number = _as_float(scale)
    if not abs(number) <= SCALE_MAX:
        raise ValueError(f"scale must be finite, up to {SCALE_MAX:.4g} (zero and negative are fine); got {number}")
    return number


def _as_float(scale: Any, name: str = "scale") -> float:
    """A number as a float, infinite beyond every float; TypeError for what is none. A traced one stays what it is."""
    if isinstance(scale, (torch.SymFloat, torch.SymInt)) or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return scale  # type: ignore[no-any-return]  # stands for a float until the graph runs
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise TypeError(f"{name} must be a float or None; got {type(scale).__name__}")
    try:
        return float(scale)
    except OverflowError:  # an int or a fraction beyond every float
        return math.inf


def _strides(tensor: torch.Tensor) -> Strides:
    """Strides of (B, H, S), with those of one-element or empty dimensions made canonical.

    PyTorch leaves the stride of a size-1 dimension arbitrary; nobody walks it, so it must not spoil alignment.
    """
    canonical = _contiguous_strides(tuple(tensor.shape))
    if tensor.numel() == 0:
        return canonical
    walked = zip(tensor.shape, tensor.stride(), canonical, strict=False)
    batch, head, row = (given if size > 1 else own for size, given, own in walked)
    return batch, head, row


def _contiguous_strides(shape: Shape) -> Strides:
    _, heads, seq, head_dim = (max(size, 1) for size in shape)
    return heads * seq * head_dim, seq * head_dim, head_dim


def _dense_strides(strides: Strides, shape: Shape) -> Strides:
    """`strides` if they are those of dense ``[B, S, H, D]`` memory, else those of contiguous ``[B, H, S, D]``."""
    _, heads, seq, head_dim = shape
    transposed = (seq * heads * head_dim, head_dim, heads * head_dim)
    return transposed if strides == transposed else _contiguous_strides(shape)


def _list(named: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in named.items())
