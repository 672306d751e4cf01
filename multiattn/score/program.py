"""The modification of scores that a call asks for: a `ScoreProgram`, free of tensors, and its binding to the numbers
and tensors of the call, `BoundScore`."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from multiattn.score import named
from multiattn.score.arithmetic import BITS
from multiattn.score.expression import Node, read, walk
from multiattn.score.fingerprint import Fingerprint, UnknownError
from multiattn.score.integers import LONGEST
from multiattn.score.printing import TEXT
from multiattn.score.trace import Tracer
from multiattn.score.transforms import apart, requires_grad


class Captured(NamedTuple):
    """A captured tensor as code depends on it: its dtype and rank, not its sizes, strides or address."""

    dtype: torch.dtype
    rank: int

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} of rank {self.rank}"


@dataclass(frozen=True, kw_only=True)
class ScoreProgram:
    """The modification of every score, and the mask that follows it, as expressions.

    `score` (f32) is of the input ``score``, ``scale * q.k``; None leaves scores as they are. `mask` (bool) is true
    where the query sees the key; None is true everywhere. Equal programs have equal text, so generated code depends on
    `digest` alone.
    """

    score: Node | None
    mask: Node | None
    tail: Node | None = None
    """The mask hides none but the last keys: so many (f32, of scalars); None: it may hide any."""
    scalars: tuple[str, ...]
    """Names of the fp32 numbers that each call brings."""
    tensors: tuple[Captured, ...]
    """By slot."""

    @functools.cached_property
    def text(self) -> str:
        """The program as a reader wants it: tensors and scalars, then assignments."""
        lines = [f"tensor{slot}: {captured}" for slot, captured in enumerate(self.tensors)]
        lines += [f"{name}: f32" for name in self.scalars]
        for name, root in (("score", self.score), ("mask", self.mask), ("tail", self.tail)):
            if root is not None:
                statements, (result,) = TEXT.statements([root])
                lines += [*statements, f"{name} = {result}"]
        return "\n".join(lines)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the text, in hexadecimal digits."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @functools.cached_property
    def roots(self) -> tuple[Node, ...]:
        """The expressions that there are."""
        return tuple(it for it in (self.score, self.mask, self.tail) if it is not None)

    @functools.cached_property
    def loads(self) -> tuple[Node, ...]:
        """All loads of both expressions, each once."""
        return tuple(it for it in walk(*self.roots) if it.op == "load")

    @functools.cached_property
    def slots_of_score(self) -> frozenset[int]:
        """Slots of the tensors that the score depends on: those of a mask alone have no gradient."""
        found = () if self.score is None else walk(self.score)
        return frozenset(it.value for it in found if it.op == "load")

    @functools.cached_property
    def multiplies(self) -> bool:
        """True if it has products of integers, whose sign is known of positions below `LONGEST` alone."""
        return any(it.op == "mul" and it.dtype in BITS for it in walk(*self.roots))

    def sum_of(self, slot: int, scores: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The gradient of a tensor of this shape, of one for each score ``[B, Hq, Sq, Skv]``; see `why_not_apart`."""
        (load,) = (it for it in self.loads if it.value == slot)
        kept = [_AXES.index(it.value) for it in load.args if it.op == "input"]
        summed = [axis for axis in range(len(_AXES)) if axis not in kept]
        total = (scores.sum(summed) if summed else scores).permute([sorted(kept).index(axis) for axis in kept])
        gradient = scores.new_zeros(tuple(shape))
        sizes = iter(total.shape)
        gradient[tuple(slice(next(sizes)) if it.op == "input" else it.value for it in load.args)] = total
        return gradient

    def why_not_apart(self, slots: Sequence[int]) -> str | None:
        """A reason why gradients of tensors cannot be added up of one for each score; None if they can."""
        for slot in slots:
            indices = [it.args for it in self.loads if it.value == slot]
            if len(indices) > 1:
                return f"captured tensor {slot}, which is loaded {len(indices)} times"
            inputs = [it.value for it in indices[0] if it.op == "input"]
            if any(it.op not in ("input", "const") for it in indices[0]) or len(set(inputs)) < len(inputs):
                return f"captured tensor {slot}, whose index is computed"
        return None


_AXES = ("b", "h", "q", "kv")


class BoundScore(NamedTuple):
    """A program with what one call brings."""

    program: ScoreProgram
    scalars: Mapping[str, float]
    tensors: tuple[torch.Tensor, ...]
    """By slot."""

    @property
    def slots_requiring_grad(self) -> tuple[int, ...]:
        """Slots of tensors that want a gradient, of those that the score depends on."""
        used = self.program.slots_of_score
        return tuple(slot for slot, it in enumerate(self.tensors) if slot in used and requires_grad(it))

    def check(self, *, batch: int, heads: int, seq_q: int, seq_kv: int) -> None:
        """ValueError for a tensor that is too small to be indexed by a batch entry, a head or a position of these.

        Also for longer sequences than products of positions are computed for.
        """
        if max(seq_q, seq_kv) > LONGEST and self.program.multiplies:
            raise ValueError(
                f"a sequence of {max(seq_q, seq_kv)} with a score_mod or mask_mod that multiplies integers; allowed "
                f"lengths up to {LONGEST}, or products of floats: q_idx.float()"
            )
        sizes = {"b": batch, "h": heads, "q": seq_q, "kv": seq_kv}
        for load in self.program.loads:
            shape = tuple(self.tensors[load.value].shape)
            for axis, index in enumerate(load.args):
                wanted = sizes.get(index.value, 0) if index.op == "input" else 0
                if shape[axis] < wanted:
                    raise ValueError(
                        f"captured tensor {load.value}: got shape {shape}, whose dimension {axis} is indexed by "
                        f"{index.value}; allowed at least {wanted} elements there"
                    )


# ---------------------------------------------------------------- from a call's options


class Modification(NamedTuple):
    """All that changes or hides the scores of a call, in the order in which it is applied; None is none of it."""

    softcap: float | None = None
    """Finite and above 0: ``softcap * tanh(s / softcap)``."""
    alibi_slopes: torch.Tensor | None = None
    """``[Hq]`` or ``[B, Hq]``: ``s - slope * |i + Skv - Sq - j|``."""
    bias: torch.Tensor | None = None
    """``[B|1, Hq|1, Sq|1, Skv|1]``, added; -inf hides a key."""
    score_mod: Callable[..., Any] | None = None
    """FlexAttention's, ``(score, b, h, q_idx, kv_idx) -> score``, of 0-d tensors."""
    visible: torch.Tensor | None = None
    """Bool ``[B|1, Hq|1, Sq|1, Skv|1]``: false hides a key, whatever `score_mod` makes of it."""
    mask_mod: Callable[..., Any] | None = None
    """FlexAttention's, ``(b, h, q_idx, kv_idx) -> bool``."""
    of_cache: bool = False
    """Keys are in a cache: for callables query i is at ``i + Skv - Sq``, as in a call of all tokens."""
    last: int | None = None
    """`bias` or `visible` is of so many last keys of each sequence; None: it is of all that there is room for."""
    block_kinds: torch.Tensor | None = None
    """int32 ``[B|1, Hq|1, rows, columns]``: what each block shows, where blocks are of positions in a cache:
    nothing, a part (where `mask_mod` holds), all, as `multiattn.block_mask.kinds_of` numbers it."""
    block_sizes: tuple[int, int] | None = None
    """Queries and keys of a block."""

    @property
    def scalars(self) -> Mapping[str, float]:
        """The numbers that a call brings, by name."""
        found = {"softcap": self.softcap, "last": self.last}
        return MappingProxyType({name: float(it) for name, it in found.items() if it is not None})


_known: dict[Hashable, tuple[ScoreProgram, tuple[int, ...]]] = {}
"""Programs by fingerprint, with the place of each slot's tensor in that."""
_KNOWN_MAX = 256


def bind_score(*, device: torch.device, **options: Any) -> BoundScore | None:
    """`bind` of the `Modification` with these `options`."""
    return bind(Modification(**options), device)


def bind(asked: Modification, device: torch.device) -> BoundScore | None:
    """The program of a modification, bound to its numbers and tensors, which are on `device`; None for no program.

    A callable is traced when it, or one that differs only in values of tensors, comes for the first time. Its captured
    tensors are arguments of kernels; a captured Python number is a constant of their code.

    Raises:
        UntraceableError: a callable does what a kernel cannot.
    """
    fingerprint = Fingerprint()
    key: Hashable = None
    try:
        for part in (device, asked.softcap is not None, *asked[1:_LAST], asked.last is not None, *asked[_LAST + 1 :]):
            fingerprint.add(part)
        key = fingerprint.key
    except UnknownError:
        pass
    if (found := _known.get(key)) is not None:
        program, places = found
        tensors = tuple(fingerprint.tensors[place] for place in places)
    else:
        program, tensors = apart(lambda: trace_program(device, asked))
        places_of = {id(tensor): place for place, tensor in enumerate(fingerprint.tensors)}
        if key is not None and all(id(tensor) in places_of for tensor in tensors):
            if len(_known) >= _KNOWN_MAX:
                _known.clear()
            _known[key] = program, tuple(places_of[id(tensor)] for tensor in tensors)
    if not program.roots:
        return None
    return BoundScore(program, asked.scalars, tensors)


_LAST = Modification._fields.index("last")


def trace_program(device: torch.device, asked: Modification) -> tuple[ScoreProgram, tuple[torch.Tensor, ...]]:
    """The program of a modification, and the tensors that it loads from, by slot."""
    tracer = Tracer(device)
    score = read("score")

    def modified(modification: Callable[..., Any], *arguments: Any) -> Node:
        return tracer.trace(modification, tracer.stand_in(score), *arguments, dtype="f32")

    def shown(mask: Callable[..., Any], *arguments: Any) -> Node:
        return tracer.trace(mask, *arguments, dtype="bool")

    def seen(mask: Node) -> torch.Tensor:
        return tracer.stand_in(mask, torch.bool)

    def own_place() -> Sequence[torch.Tensor]:
        return tracer.place_in_cache[:4] if asked.of_cache else tracer.place[:4]

    scalars = {name: tracer.scalar(name) for name in asked.scalars}
    last = scalars.get("last")
    if asked.softcap is not None:
        score = modified(named.softcap, tracer.place, scalars["softcap"])
    if asked.alibi_slopes is not None:
        score = modified(named.alibi, tracer.place, asked.alibi_slopes)
    if asked.bias is not None:
        score = modified(named.bias, tracer.place, asked.bias, last)
    if asked.score_mod is not None:
        score = modified(asked.score_mod, *own_place())
    mask, tail = None, None
    if asked.visible is not None and last is not None:
        mask, tail = shown(named.sees, tracer.place, asked.visible, last), tracer.node(last)
    elif asked.visible is not None:
        score = modified(named.hide, seen(shown(named.sees, tracer.place, asked.visible, None)))
    own_mask = shown(asked.mask_mod, *own_place()) if asked.mask_mod is not None else None
    if asked.block_kinds is not None:
        given = None if own_mask is None else seen(own_mask)
        in_blocks = shown(named.sees_block, tracer.place_in_cache, asked.block_kinds, asked.block_sizes, given)
        score = modified(named.hide, seen(in_blocks))
    elif own_mask is not None:
        mask = own_mask
    program = ScoreProgram(
        score=None if score is read("score") else score,
        mask=None if mask is None or (mask.op == "const" and mask.value) else mask,
        tail=tail,
        scalars=tuple(scalars),
        tensors=tuple(Captured(dtype=it.dtype, rank=it.dim()) for it in tracer.tensors),
    )
    return program, tuple(tracer.tensors)
