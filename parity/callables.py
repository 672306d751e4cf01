"""FlexAttention's callables that every backend must take: a table, each with a name and the reason it is there.

Most are what attention-gym shows, written from their definitions. A factory draws the tensors that its callable
captures, the same for every device.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

ScoreMod = Callable[..., torch.Tensor]
MaskMod = Callable[..., torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The shape of the scores, ``[batch, heads, seq_q, seq_kv]``, and where captured tensors live."""

    batch: int
    heads: int
    seq_q: int
    seq_kv: int
    device: torch.device
    seed: int = 0

    @property
    def longest(self) -> int:
        """Positions of the longer sequence."""
        return max(self.seq_q, self.seq_kv)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> torch.Tensor:
        """A captured tensor of normal numbers, which wants a gradient if `grad`."""
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(self.seed)).to(self.device, dtype)
        return drawn.requires_grad_(grad)

    def integers(self, below: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """A captured tensor of integers from 0."""
        drawn = torch.randint(below, shape, generator=torch.Generator().manual_seed(self.seed))
        return drawn.to(self.device, dtype)

    def documents(self, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """The document of each position: four of them, in order."""
        return self.integers(4, self.longest, dtype=dtype).sort().values


@dataclass(frozen=True, kw_only=True, slots=True)
class CallableCase:
    """A callable of one of the two kinds, made by its factory for a shape."""

    name: str
    why: str
    score_mod: Callable[[Sizes], ScoreMod] | None = None
    mask_mod: Callable[[Sizes], MaskMod] | None = None

    def make(self, sizes: Sizes) -> dict[str, Callable[..., torch.Tensor]]:
        """The callables by the names of `fmha`'s options."""
        own = Sizes(
            batch=sizes.batch, heads=sizes.heads, seq_q=sizes.seq_q, seq_kv=sizes.seq_kv, device=sizes.device,
            seed=zlib.crc32(self.name.encode()),
        )  # fmt: skip
        made = {"score_mod": self.score_mod, "mask_mod": self.mask_mod}
        return {kind: factory(own) for kind, factory in made.items() if factory is not None}


_CASES: dict[str, CallableCase] = {}


def _score(why: str) -> Callable[[Callable[[Sizes], ScoreMod]], Callable[[Sizes], ScoreMod]]:
    def enter(factory: Callable[[Sizes], ScoreMod]) -> Callable[[Sizes], ScoreMod]:
        name = factory.__name__.strip("_")
        _CASES[name] = CallableCase(name=name, why=why, score_mod=factory)
        return factory

    return enter


def _mask(why: str) -> Callable[[Callable[[Sizes], MaskMod]], Callable[[Sizes], MaskMod]]:
    def enter(factory: Callable[[Sizes], MaskMod]) -> Callable[[Sizes], MaskMod]:
        name = factory.__name__.strip("_")
        _CASES[name] = CallableCase(name=name, why=why, mask_mod=factory)
        return factory

    return enter


# ---------------------------------------------------------------- scores


@_score("nothing to compute: the kernel without a hook")
def _identity(sizes: Sizes) -> ScoreMod:
    return lambda s, b, h, q, kv: s


@_score("integers become a float")
def _relative_position(sizes: Sizes) -> ScoreMod:
    return lambda s, b, h, q, kv: s + 0.1 * (q - kv)


@_score("a table by distance: computed indices, atomics in the backward")
def _relative_bias(sizes: Sizes) -> ScoreMod:
    table, last = sizes.normal(sizes.seq_q + sizes.seq_kv), sizes.seq_kv
    return lambda s, b, h, q, kv: s + table[q - kv + last]


@_score("indices below zero count from the end")
def _wrapped_bias(sizes: Sizes) -> ScoreMod:
    table = sizes.normal(sizes.longest)
    return lambda s, b, h, q, kv: s + table[kv - q]


@_score("T5's buckets: where and integer division in an index, a table for each head")
def _bucketed_bias(sizes: Sizes) -> ScoreMod:
    table = sizes.normal(sizes.heads, 16)

    def bucketed_bias(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        distance = (q - kv).abs()
        return s + table[h, torch.where(distance < 8, distance, (8 + distance // 8).clamp(max=15))]

    return bucketed_bias


@_score("one element for each score, in bf16: a gradient without atomics")
def _full_bias(sizes: Sizes) -> ScoreMod:
    bias = sizes.normal(sizes.batch, sizes.heads, sizes.seq_q, sizes.seq_kv, dtype=torch.bfloat16)
    return lambda s, b, h, q, kv: s + bias[b, h, q, kv]


@_score("one element for each score, shared by the batch: a gradient with atomics")
def _shared_bias(sizes: Sizes) -> ScoreMod:
    bias = sizes.normal(sizes.heads, sizes.seq_q, sizes.seq_kv)
    return lambda s, b, h, q, kv: s + bias[h, q, kv]


@_score("one element a key: a gradient that is summed over queries and heads")
def _key_bias(sizes: Sizes) -> ScoreMod:
    bias = sizes.normal(sizes.batch, sizes.seq_kv, dtype=torch.float16)
    return lambda s, b, h, q, kv: s + bias[b, kv]


@_score("attention-gym's ALiBi: the slope is computed from the head")
def _alibi(sizes: Sizes) -> ScoreMod:
    heads = sizes.heads
    return lambda s, b, h, q, kv: s + torch.exp2(-((h + 1) * 8.0 / heads)) * (kv - q)


@_score("learned slopes: one gradient a head, summed over all scores")
def _learned_alibi(sizes: Sizes) -> ScoreMod:
    slopes = sizes.normal(sizes.heads)
    return lambda s, b, h, q, kv: s - slopes[h] * (q - kv).abs() / 16


@_score("a constant softcap")
def _softcap(sizes: Sizes) -> ScoreMod:
    return lambda s, b, h, q, kv: 20 * torch.tanh(s / 20)


@_score("a captured number, with a gradient")
def _learned_softcap(sizes: Sizes) -> ScoreMod:
    cap = (2 + sizes.normal(grad=False).abs()).requires_grad_()
    return lambda s, b, h, q, kv: cap * torch.tanh(s / cap)


@_score("a temperature for each head: the slope is loaded")
def _head_temperature(sizes: Sizes) -> ScoreMod:
    temperature = sizes.normal(sizes.heads)
    return lambda s, b, h, q, kv: s * temperature[h]


@_score("QK-norm's log-length temperature: log, and a constant power")
def _length_temperature(sizes: Sizes) -> ScoreMod:
    return lambda s, b, h, q, kv: s * torch.log(q + 2.0) / 2.0**0.5


@_score("a mask as a score: -inf beside finite slopes")
def _causal_score(sizes: Sizes) -> ScoreMod:
    return lambda s, b, h, q, kv: torch.where(q >= kv, s, -float("inf"))


@_score("FlexAttention's checkerboard example: remainders of negative numbers")
def _checkerboard(sizes: Sizes) -> ScoreMod:
    def checkerboard(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        s = torch.where((kv - q) % 2 == 1, s * 0.5, s)
        return torch.where((kv - q) % 3 == 0, s * 2.0, s)

    return checkerboard


@_score("retention: a decay for each head")
def _decay(sizes: Sizes) -> ScoreMod:
    rate = sizes.normal(sizes.heads)
    return lambda s, b, h, q, kv: s + F.logsigmoid(rate[h]) * (q - kv).clamp(min=0)


@_score("stick-breaking weights: log of a sigmoid")
def _log_sigmoid(sizes: Sizes) -> ScoreMod:
    return lambda s, b, h, q, kv: F.logsigmoid(s)


@_score("sigmoid, softplus, relu and gelu, as PyTorch decomposes them")
def _activations(sizes: Sizes) -> ScoreMod:
    return lambda s, b, h, q, kv: torch.sigmoid(s) + F.softplus(s) - F.relu(s) + F.gelu(s, approximate="tanh")


@_score("powers, a root, a reciprocal")
def _powers(sizes: Sizes) -> ScoreMod:
    return lambda s, b, h, q, kv: s - 0.05 * s**2 + torch.sqrt(s.abs() + 1) + (s.square() + 2) ** -1


@_score("bounds: min and max pass NaN on, and pass the slope where they do not bind")
def _clamped(sizes: Sizes) -> ScoreMod:
    return lambda s, b, h, q, kv: torch.maximum(s.clamp(-1.5, 1.5), 0.25 * s)


@_score("in-place operations rebind a name")
def _in_place(sizes: Sizes) -> ScoreMod:
    def in_place(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        s = s * 1.5
        s += q / 64
        s.clamp_(max=4.0)
        return s

    return in_place


@_score("a bool as a number, and its complement")
def _same_document_bonus(sizes: Sizes) -> ScoreMod:
    documents = sizes.documents()
    return lambda s, b, h, q, kv: s * (documents[q] == documents[kv]) + 0.5 * ~(q == kv)


@_score("a result without the score: every score must still be there, and dq is zero")
def _constant_scores(sizes: Sizes) -> ScoreMod:
    table = sizes.normal(sizes.seq_kv)
    return lambda s, b, h, q, kv: table[kv]


@_score("all at once: nodes that are shared, both kinds of gradient")
def _composite(sizes: Sizes) -> ScoreMod:
    cap = (2 + sizes.normal(grad=False).abs()).requires_grad_()
    slopes = sizes.normal(sizes.heads)
    bias = sizes.normal(sizes.batch, sizes.heads, sizes.seq_q, sizes.seq_kv)

    def composite(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        near = cap * torch.tanh(s / cap) + slopes[h] * (kv - q).abs()
        s = torch.where((q - kv).abs() <= 10, near, s.clamp(min=-0.5) * 0.5)
        return s + F.softplus(s) * 0.1 + bias[b, h, q, kv] * (q // 5 == kv // 5)

    return composite


@_score("positions that repeat, and sigmoids of the score: sin, cos, erf, sign")
def _periodic(sizes: Sizes) -> ScoreMod:
    phases = sizes.normal(sizes.heads)

    def periodic(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + torch.sin(0.25 * (q - kv) + phases[h]) + 0.5 * torch.erf(s) * torch.cos(s) + 0.1 * torch.sign(s)

    return periodic


@_score("quotients and remainders of floats, cut to integers: an ulp would change them")
def _rounded(sizes: Sizes) -> ScoreMod:
    table = sizes.normal(64)

    def rounded(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        distance = (q - kv) / 0.3
        return s + table[(q / 0.3).int() % 64] + 0.1 * torch.round(distance % 8.2) - 0.01 * (distance // 1.75)

    return rounded


@_score("Inkling's relative logits: each token of each head has its own, by distance, as far as they reach")
def _relative_logits(sizes: Sizes) -> ScoreMod:
    extent = 64
    logits = sizes.normal(sizes.batch, sizes.heads, sizes.longest, extent, dtype=torch.bfloat16)

    def relative_logits(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        distance = q - kv
        is_near = (distance >= 0) & (distance < extent)
        return s + torch.where(is_near, logits[b, h, q, distance.clamp(0, extent - 1)], 0.0)

    return relative_logits


# ---------------------------------------------------------------- masks


def _causal_mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


@_mask("everything is visible: the kernel without a hook")
def _noop(sizes: Sizes) -> MaskMod:
    return noop_mask  # type: ignore[no-any-return]


@_mask("the usual mask, top-left aligned as in FlexAttention")
def _causal(sizes: Sizes) -> MaskMod:
    return _causal_mask


@_mask("and_masks: a closure over a tuple of functions")
def _sliding_window(sizes: Sizes) -> MaskMod:
    return and_masks(_causal_mask, lambda b, h, q, kv: q - kv <= 5)  # type: ignore[no-any-return]


@_mask("or_masks, and a captured integer for each batch entry")
def _prefix_lm(sizes: Sizes) -> MaskMod:
    prefix = sizes.integers(sizes.seq_kv, sizes.batch)
    return or_masks(_causal_mask, lambda b, h, q, kv: kv < prefix[b])  # type: ignore[no-any-return]


@_mask("packed documents")
def _document(sizes: Sizes) -> MaskMod:
    documents = sizes.documents()
    return lambda b, h, q, kv: documents[q] == documents[kv]


@_mask("the same with 64-bit integers, causal")
def _causal_document(sizes: Sizes) -> MaskMod:
    documents = sizes.documents(torch.int64)
    return and_masks(lambda b, h, q, kv: documents[q] == documents[kv], _causal_mask)  # type: ignore[no-any-return]


@_mask("attention-gym's inner mask of documents: an index that is itself loaded")
def _document_window(sizes: Sizes) -> MaskMod:
    documents = sizes.documents(torch.int64)
    starts = torch.searchsorted(documents, torch.arange(4, device=sizes.device))

    def document_window(b: Any, h: Any, q: Any, kv: Any) -> Any:
        own, other = q - starts[documents[q]], kv - starts[documents[kv]]
        return (documents[q] == documents[kv]) & (own - other >= 0) & (own - other < 4)

    return document_window


@_mask("neighbourhood attention in two dimensions: quotients and remainders of positions")
def _natten_2d(sizes: Sizes) -> MaskMod:
    width, reach = 6, 1

    def natten_2d(b: Any, h: Any, q: Any, kv: Any) -> Any:
        x, y = q // width, q % width
        center_x, center_y = x.clamp(reach, width - 1 - reach), y.clamp(reach, width - 1 - reach)
        return ((center_x - kv // width).abs() <= reach) & ((center_y - kv % width).abs() <= reach)

    return natten_2d


@_mask("a power of two: shifts and masks")
def _block_diagonal(sizes: Sizes) -> MaskMod:
    return lambda b, h, q, kv: q // 8 == kv // 8


@_mask("blocks here and there, by head: whole ones, and rows of them with none")
def _scattered(sizes: Sizes) -> MaskMod:
    block = min(128, sizes.seq_kv // 2)
    return lambda b, h, q, kv: ((q // block + kv // block) % 2 == 0) & (q // block != 1 + h % 2)


@_mask("a dilated window: remainders of negative numbers")
def _dilated_window(sizes: Sizes) -> MaskMod:
    return lambda b, h, q, kv: ((q - kv).abs() <= 9) & ((q - kv) % 3 == 0)


@_mask("a sparse transformer's strided heads: the head decides")
def _strided(sizes: Sizes) -> MaskMod:
    return lambda b, h, q, kv: torch.where(h % 2 == 0, q - kv < 4, (q - kv) % 4 == 0) & (q >= kv)


@_mask("a longer prefix for each head and batch entry: each has lists of its own, with full blocks among them")
def _own_prefix(sizes: Sizes) -> MaskMod:
    keys, heads, parts = sizes.seq_kv, sizes.heads, sizes.batch * sizes.heads + 1
    return lambda b, h, q, kv: (q >= kv) | (kv < (b * heads + h + 1) * keys // parts)


@_mask("Transfusion: causal text, images that see themselves; a table of two images for each batch entry")
def _transfusion(sizes: Sizes) -> MaskMod:
    begin = sizes.integers(max(sizes.longest // 2, 1), sizes.batch, 2)
    end = begin + 5

    def transfusion(b: Any, h: Any, q: Any, kv: Any) -> Any:
        visible = q >= kv
        for image in range(2):
            first, last = begin[b, image], end[b, image]
            visible = visible | ((q >= first) & (q < last) & (kv >= first) & (kv < last))
        return visible

    return transfusion


@_mask("PaliGemma and Gemma: the tokens of an image before the text see each other, another number in each entry")
def _image_prefix(sizes: Sizes) -> MaskMod:
    prefix = sizes.longest // 3 + sizes.integers(max(sizes.longest // 3, 1), sizes.batch)
    return lambda b, h, q, kv: (q >= kv) | ((q < prefix[b]) & (kv < prefix[b]))


@_mask("padded batches: the mask does not depend on the query")
def _padding(sizes: Sizes) -> MaskMod:
    lengths = 1 + sizes.integers(sizes.seq_kv, sizes.batch)
    return lambda b, h, q, kv: kv < lengths[b]


@_mask("attention sinks: global keys beside a window")
def _global_and_window(sizes: Sizes) -> MaskMod:
    return lambda b, h, q, kv: torch.logical_and(q >= kv, torch.logical_or(kv < 2, torch.logical_not(q - kv > 6)))


@_mask("a table of bools, half of an index at a time")
def _table(sizes: Sizes) -> MaskMod:
    visible = sizes.integers(2, sizes.heads, sizes.seq_q, sizes.seq_kv, dtype=torch.bool)
    return lambda b, h, q, kv: visible[h][q, kv]


@_mask("bits of positions: xor and shifts, as of an FFT's butterfly")
def _butterfly(sizes: Sizes) -> MaskMod:
    return lambda b, h, q, kv: (((q ^ kv) & 5) == 0) | ((q ^ kv) >> 2 == 1)


@_mask("windows whose borders are multiples of a divisor whose reciprocal is too small")
def _divided_windows(sizes: Sizes) -> MaskMod:
    return lambda b, h, q, kv: (3 * q / 0.3).floor() // 45 == torch.div(3 * kv, 4.5, rounding_mode="floor")


CALLABLES: tuple[CallableCase, ...] = (
    *_CASES.values(),
    CallableCase(
        name="alibi_in_documents",
        why="both kinds at once, each with tensors of its own",
        score_mod=_learned_alibi,
        mask_mod=_causal_document,
    ),
)
"""Every case; names are unique."""
