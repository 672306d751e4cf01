"""The arguments of a call: its `Options`, its tensors by name (`Operands`), what modifies its scores (`ScoreSpec`)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling

from multiattn.block_mask import (
    BlockSpec,
    in_sequences,
    kinds_of,
    lists_of,
    may_hide_blocks,
    of_sequences,
    read_block_mask,
)
from multiattn.layout import Layout, Shape, row_major
from multiattn.mask import Band, Window, band_of
from multiattn.plain import as_bool
from multiattn.score import BoundScore, LoweredScore, Modification, ScoreProgram, bind
from multiattn.score.record import Recorder, program_of
from multiattn.score.serial import dumps, loads
from multiattn.score.transforms import requires_grad
from multiattn.sequences import NO_INDICES, Batching, Indices
from multiattn.validate import as_float, check_inputs, check_modification, refuse_dropout

ScoreMod = Callable[..., torch.Tensor]
"""FlexAttention's ``(score, b, h, q_idx, kv_idx) -> score``."""


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
    """A block mask, whose lists are among the call's `Indices`."""
    batching: Batching | None = None
    """A packed batch, or keys and values in a cache; what says where they are is among the call's `Indices`."""
    backend: str = "auto"
    variant: str | None = None
    deterministic: bool = False
    row_max: bool = False
    """The largest score of each row is a third result."""

    @classmethod
    def of(
        cls,
        *,
        causal: bool,
        window: Window | None,
        scale: float | None,
        has_sinks: bool = False,
        dropout_p: float = 0,
        backend: str,
        variant: str | None,
        deterministic: bool | None,
    ) -> Options:
        """Validate the types; TypeError, naming what came. Equal options ask for the same from here on.

        ``True == 1 == 1.0``, so an unchecked value would find the plan of another call. `deterministic` None follows
        `torch.use_deterministic_algorithms`.
        """
        if dropout_p != 0.0:
            refuse_dropout(dropout_p)
        if window is None and type(causal) is bool:
            left, right = None, 0 if causal else None
        else:
            left, right = band_of(causal, window).window
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        elif type(deterministic) is not bool:
            hint = "None follows torch.use_deterministic_algorithms"
            deterministic = as_bool(deterministic, "deterministic", hint, "a bool or None")
        if not isinstance(backend, str):
            hint = 'leave it out for "auto", or name one of multiattn.backends()'
            raise TypeError(f"backend must be a string; got {type(backend).__name__}; {hint}")
        if variant is not None and not isinstance(variant, str):
            hint = "`multiattn explain` lists their names"
            raise TypeError(f"variant must be a string; got {type(variant).__name__}; {hint}")
        if scale is not None and type(scale) is not float:
            scale = as_float(scale)
        options = (left, right, scale, has_sinks, None, (), (), None, None, backend, variant, deterministic, False)
        return tuple.__new__(cls, options)  # what cls() does, in half the time

    def with_score(self, score: BoundScore | None) -> Options:
        """These options with a modification of every score."""
        if score is None:
            return self
        slots = score.slots_requiring_grad if torch.is_grad_enabled() else ()
        return self._replace(score=dumps(score.program), scalars=tuple(score.scalars.values()), gradient_slots=slots)

    @property
    def band(self) -> Band:
        """The mask."""
        return Band(self.left, self.right)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of a call's inputs in their order in `Operands.inputs`, but for captured tensors, which follow."""
        return ("q", "k", "v", *(("sinks",) if self.has_sinks else ()), *self.indices)

    @property
    def indices(self) -> tuple[str, ...]:
        """Names of the `Indices` of a call, in their order there."""
        return _names_of_indices(self.blocks, self.batching)

    @property
    def of_gradient(self) -> Options:
        """The options of the backward that autograd runs: `variant` and `row_max` are the forward's."""
        return self._replace(variant=None, row_max=False) if self.row_max or self.variant is not None else self


class Operands(NamedTuple):
    """Every tensor of a launch, by name; None where a launch has none.

    q ``[B, Hq, Sq, D]``, k ``[B, Hkv, Skv, D]``, v ``[B, Hkv, Skv, Dv]``; out and dout like q, but as wide as v; dq, dk
    and dv like q, k and v; lse, dlse, delta and row_max fp32 ``[B, Hq, Sq]``; sinks ``[Hq]``, fp32 where a kernel reads
    it. A forward reads q, k, v and sinks, and writes out, lse, and row_max where that is asked; a backward reads all of
    these but row_max, dout and perhaps dlse, and writes dq, dk and dv, and delta where something is computed of it
    afterwards.

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
    """The tensors that the modification of scores loads from, by slot."""
    dcaptured: tuple[torch.Tensor, ...] = ()
    """Sums of the gradients of some of them, to which a backward adds: `ScoreSpec.gradient_layouts`."""
    indices: Indices = NO_INDICES
    row_max: torch.Tensor | None = None
    """The largest final score of each row, natural units, -inf of none; a sink is no score."""

    @classmethod
    def of_inputs(cls, inputs: Sequence[Any], names: Sequence[str], *results: Any) -> Operands:
        """The operands of a forward of these `inputs`, whose names `Options.inputs` has, and its `results`, if any."""
        q, k, v, *others = inputs
        sinks = others.pop(0) if "sinks" in names else None
        of_indices = names[len(inputs) - len(others) :]
        captured = tuple(others[len(of_indices) :])
        indices = Indices(**dict(zip(of_indices, others, strict=False))) if of_indices else NO_INDICES
        return cls(q, k, v, *results, sinks=sinks, captured=captured, indices=indices)  # type: ignore[misc]  # these are

    @classmethod
    def of_read(cls, read: Sequence[torch.Tensor | None], names: Sequence[str]) -> Operands:
        """The operands of a backward that reads these, as `read` has them."""
        return cls.of_inputs(read[:-_RESULTS], names, *read[-_RESULTS:])

    @classmethod
    def like(cls, layouts: Mapping[str, Layout], make: Callable[[Layout], torch.Tensor]) -> Operands:
        """Tensors of a problem, one of each of its `layouts` that is an operand."""
        named = {name: make(layouts[name]) for name in cls._fields if name in layouts}
        indices = Indices(**{name: make(layouts[name]) for name in Indices._fields if name in layouts})
        captured, dcaptured = (
            tuple(make(layouts[name]) for name in itertools.takewhile(layouts.__contains__, map(name_of, _PLACES)))
            for name_of in (captured_name, dcaptured_name)
        )
        return cls(**named, captured=captured, dcaptured=dcaptured, indices=indices)

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """Every tensor that there is, by its name."""
        named = {name: it for name, it in zip(self._fields, self, strict=True) if isinstance(it, torch.Tensor)}
        named |= {captured_name(slot): it for slot, it in enumerate(self.captured)}
        named |= {dcaptured_name(place): it for place, it in enumerate(self.dcaptured)}
        return named | dict(self.indices.named)

    @property
    def results(self) -> tuple[torch.Tensor | None, ...]:
        """The results of a forward and their gradients: out, lse, dout and dlse."""
        return self[INPUTS:READ]  # type: ignore[return-value]  # tensors, or None

    @property
    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v."""
        return self[:INPUTS]  # type: ignore[return-value]  # the rest may be None

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The tensors that a caller of the forward gives, in the order of their gradients: `Options.inputs`."""
        if self.sinks is None:
            if self.indices is NO_INDICES:
                return (*self.qkv, *self.captured) if self.captured else self.qkv
            return (*self.qkv, *self.indices.given, *self.captured)
        return (*self.qkv, self.sinks, *self.indices.given, *self.captured)

    @property
    def read(self) -> tuple[Any, ...]:
        """Every tensor that a backward reads: the inputs, out, lse, dout and dlse."""
        return (*self.inputs, *self.results)

    @property
    def requires_grad(self) -> bool:
        """True if a gradient of an input is wanted, or of the scales of a cache; other indices have none."""
        k_scale, v_scale = self.indices.k_scale, self.indices.v_scale
        if k_scale is not None and v_scale is not None and (k_scale.requires_grad or v_scale.requires_grad):
            return True
        if self.q.requires_grad or self.k.requires_grad or self.v.requires_grad:
            return True
        if self.sinks is not None and self.sinks.requires_grad:
            return True
        return bool(self.captured) and any(tensor.requires_grad for tensor in self.captured)


@functools.lru_cache(maxsize=64)
def _names_of_indices(blocks: BlockSpec | None, batching: Batching | None) -> tuple[str, ...]:
    found = {*(() if blocks is None else blocks.names), *(() if batching is None else batching.names)}
    return tuple(name for name in Indices._fields if name in found)


INPUTS = 3
"""How many operands every caller of a forward gives: q, k and v."""

READ = Operands._fields.index("dq")
"""How many every backward reads, dlse among them though it may be None."""

_RESULTS = READ - INPUTS

FORWARD_RESULTS, GRADIENTS = ("out", "lse"), ("dq", "dk", "dv")
"""Names of the operands that every forward and every backward write."""


class ScoreSpec(NamedTuple):
    """The modification of every score, its numbers, and what the tensors that it loads from look like."""

    program: ScoreProgram
    scalars: tuple[float, ...]
    """In the order of the program's own."""
    shapes: tuple[Shape, ...]
    """Shapes of captured tensors, by slot, as `strides` are, in elements."""
    strides: tuple[Shape, ...]
    gradients: tuple[int, ...] = ()
    """Slots of the tensors that want a gradient."""
    scores: Shape | None = None
    """``[B, Hq, Sq, Skv]`` where each score has an element of its own in the sum of a gradient, which is then
    deterministic; None where the sum has the shape of the tensor."""

    @property
    def numbers(self) -> Mapping[str, float]:
        """The numbers by their names."""
        return dict(zip(self.program.scalars, self.scalars, strict=True))

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """The captured tensors by their names among the operands of a launch."""
        captured = zip(self.shapes, self.strides, self.program.tensors, strict=True)
        return {captured_name(slot): Layout(*it[:2], it[2].dtype) for slot, it in enumerate(captured)}

    @property
    def gradient_layouts(self) -> Mapping[str, Layout]:
        """The sums of gradients by their names among the operands of a launch: fp32, contiguous, zero before it."""
        shapes = (self.shapes[slot] if self.scores is None else self.scores for slot in self.gradients)
        layouts = (Layout(shape, row_major(shape), torch.float32) for shape in shapes)
        return {dcaptured_name(place): it for place, it in enumerate(layouts)}

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

    def gradient_arguments(self, lowered: LoweredScore) -> Mapping[str, int | str]:
        """Values of `lowered.gradient_fields` of the slots that want a gradient."""
        names = {slot: dcaptured_name(place) for place, slot in enumerate(self.gradients)}
        return {
            it.name: names[it.slot] if it.kind == "pointer" else self.gradient_layouts[names[it.slot]].strides[it.axis]
            for it in lowered.gradient_fields(self.gradients)
        }


CAPTURED, DCAPTURED = "captured", "dcaptured"
_PLACES = range(1 << 16)


def has_any_shape(name: str) -> bool:
    """True for an operand of whose sizes and strides a launch knows nothing from q, k and v."""
    return name in Indices._fields or name.startswith((CAPTURED, DCAPTURED))


def captured_name(slot: int) -> str:
    """The name of a captured tensor among the operands of a launch."""
    return f"{CAPTURED}{slot}"


def dcaptured_name(place: int) -> str:
    """The name of the sum of the gradient of the tensor at this place of `ScoreSpec.gradients`."""
    return f"{DCAPTURED}{place}"


def score_spec(
    captured: tuple[torch.Tensor, ...],
    device: torch.device,
    options: Options,
    lengths: tuple[int, int, int],
    heads: int,
) -> ScoreSpec:
    """The modification of a call; ValueError for captured tensors that are elsewhere than q, or too small.

    `lengths` are the number of sequences and the most queries and keys of one, `heads` those of q.
    """
    assert options.score is not None
    program = loads(options.score)
    bound = BoundScore(program, dict(zip(program.scalars, options.scalars, strict=True)), captured)
    for slot, tensor in enumerate(captured):
        if tensor.device != device:
            allowed = f"the device of q, {device}"
            raise ValueError(
                f"{captured_name(slot)}: got a tensor on {tensor.device}; allowed {allowed}; move it there"
            )
    is_apart = options.deterministic and bool(options.gradient_slots)
    batch, seq_q, seq_kv = lengths
    bound.check(batch=batch, heads=heads, seq_q=seq_q, seq_kv=seq_kv)
    return ScoreSpec(
        program=program,
        scalars=options.scalars,
        shapes=tuple(tuple(it.shape) for it in captured),
        strides=tuple(it.stride() for it in captured),
        gradients=options.gradient_slots,
        scores=(batch, heads, seq_q, seq_kv) if is_apart else None,
    )


def with_score(
    operands: Operands,
    options: Options,
    softcap: float | None,
    alibi_slopes: torch.Tensor | None,
    bias: torch.Tensor | None,
    score_mod: ScoreMod | None,
    block_mask: object = None,
    *,
    lengths: tuple[int, int, int] | None = None,
    starts: Sequence[torch.Tensor] | None = None,
) -> tuple[Operands, Options]:
    """The operands and options with the scores that a call asks for. TypeError or ValueError, naming what came.

    `lengths` are the number of sequences and the most queries and keys of one, `starts` the cu_seqlens of both; None
    for those of q and k. A bool `bias` becomes the lists of a block mask where its shape says that this pays
    (`may_hide_blocks`), and a score of -inf where it does not, in a packed batch, and beside a `block_mask`: the same
    for every backend.
    Dynamo can trace neither the checks nor what traces callables; it gets the program as a constant.
    """
    if softcap is None and alibi_slopes is None and bias is None and score_mod is None and block_mask is None:
        return operands, options
    compiling = is_compiling()
    if not compiling:  # else they are checked when their op is called
        check_inputs(*operands.qkv, strides=False)
    batch, seq_q, seq_kv = lengths or (operands.q.shape[0], operands.q.shape[2], operands.k.shape[2])
    check_modification(operands.q, (batch, seq_q, seq_kv), softcap, alibi_slopes, bias, score_mod)
    lists, mask_mod = None, None
    if block_mask is not None:
        may_differentiate = compiling or _may_differentiate(operands, score_mod, alibi_slopes, bias)
        lists, mask_mod = read_block_mask(
            block_mask, *operands.qkv[:2], has_gradient=may_differentiate, is_packed=starts is not None
        )
        if starts is not None:
            lists = of_sequences(lists, starts, has_gradient=may_differentiate)
            mask_mod = in_sequences(mask_mod, starts)
    visible = None
    if bias is not None and bias.dtype == torch.bool:
        visible, bias = bias, None
        if lists is None and lengths is None and may_hide_blocks(visible):
            (lists, mask_mod), visible = lists_of(visible), None
    asked = Modification(softcap, alibi_slopes, bias, score_mod, visible, mask_mod)
    operands, options = _modified(operands, options, asked)
    if lists is None:
        return operands, options
    return operands._replace(indices=Indices(**lists.named)), options._replace(blocks=lists.spec)


def with_score_of_cache(
    operands: Operands,
    options: Options,
    softcap: float | None,
    alibi_slopes: torch.Tensor | None,
    bias: torch.Tensor | None,
    score_mod: ScoreMod | None,
    block_mask: object,
    lengths: tuple[int, int, int],
) -> tuple[Operands, Options]:
    """`with_score` of a cache: `lengths` are of sequences, most queries of one, and keys that there is room for.

    A `bias` of fewer keys than there is room for is of the last keys of each sequence: one of bools is then the mask of
    the tiles of keys that these are in, and read for no other. Blocks are of positions among all keys, so a tile of
    queries has no list of its own: kernels look each score's block up, and hide by a score of -inf.
    """
    batch, _, room = lengths
    last = None
    if isinstance(bias, torch.Tensor) and bias.ndim == 4 and 1 < bias.shape[3] < room:
        last = bias.shape[3]
    check_modification(operands.q, lengths, softcap, alibi_slopes, bias, score_mod, last=last)
    kinds, mask_mod, sizes = None, None, None
    if block_mask is not None:
        of_all = batch, room
        lists, mask_mod = read_block_mask(block_mask, *operands.qkv[:2], has_gradient=False, room=of_all)
        kinds, sizes = kinds_of(lists), lists.spec[:2]
    visible = None
    if bias is not None and bias.dtype == torch.bool:
        visible, bias = bias, None
    asked = Modification(softcap, alibi_slopes, bias, score_mod, visible, mask_mod, True, last, kinds, sizes)
    return _modified(operands, options, asked)


def _modified(operands: Operands, options: Options, asked: Modification) -> tuple[Operands, Options]:
    """The operands with what a modification loads from, and the options with its program."""
    if is_compiling():
        captured, options = _record(operands.q, options, asked)
    else:
        score = bind(asked, operands.q.device)
        captured, options = () if score is None else score.tensors, options.with_score(score)
    return operands._replace(captured=captured), options


def _may_differentiate(operands: Operands, score_mod: ScoreMod | None, *others: torch.Tensor | None) -> bool:
    """True for a backward, and where autograd or a transform may want a gradient of an operand or of the `others`."""
    given = *operands.qkv, operands.sinks, *others
    asked = score_mod is not None or any(requires_grad(it) for it in given if it is not None)
    return operands.dout is not None or (torch.is_grad_enabled() and asked)


def _record(q: torch.Tensor, options: Options, asked: Modification) -> tuple[tuple[torch.Tensor, ...], Options]:
    """Captured tensors, and the options of the program that loads from them, where a graph is made."""
    tensors = asked.alibi_slopes, asked.bias, asked.visible, asked.block_kinds
    recorder = Recorder(q.device, [it for it in tensors if it is not None])
    score = None if asked.score_mod is None else recorder.record(asked.score_mod, has_score=True)
    mask = None if asked.mask_mod is None else recorder.record(asked.mask_mod, has_score=False)
    has = tuple([it is not None for it in (asked.softcap, *tensors)])
    last = None if asked.last is None else 1  # any: a graph may have a symbol, and the program has a parameter of it
    of_cache = asked.of_cache, last, asked.block_sizes
    text, places, used = program_of(str(q.device), has, score, mask, recorder.captured_specs(), *of_cache)
    captured = tuple([recorder.captured[place] for place in places])
    wanted = tuple(slot for slot in used if captured[slot].requires_grad)
    return captured, options._replace(
        score=text,
        scalars=tuple([it for it in (asked.softcap, asked.last) if it is not None]),
        gradient_slots=wanted if torch.is_grad_enabled() else (),
    )
