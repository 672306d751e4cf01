"""The matrix as data: a `Cell` is one problem to time, a suite is a named tuple of cells."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Literal, get_args

import torch

import multiattn
from bench import block_lists, features
from multiattn.inspect.options import HIDDEN, TOKENS, HeadDims
from multiattn.layout import DTYPES, flops_per_pair
from multiattn.mask import CAUSAL, FULL, Band
from multiattn.operands import Operands, Options
from multiattn.packed import as_batch_of_one, of_batch_of_one
from multiattn.plan.backend import Direction as Pass
from multiattn.problem import Problem, problem_of
from multiattn.signatures import dense_call
from multiattn.varlen import Lengths, packed_call

Tensors = tuple[torch.Tensor, ...]
"""q, k and v, each ``[B, H, S, D or Dv]``, and sinks ``[H]`` where there are any; or their gradients."""


class InputError(ValueError):
    """An argument or a file that was given is not what is accepted; the message names both."""


Direction = Literal["fwd", "bwd", "fwdbwd"]
"""The part of a training step that is timed: the forward, the backward, or one after the other."""

DIRECTIONS: tuple[Direction, ...] = get_args(Direction)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One self-attention problem: Sq = Skv = seq."""

    batch: int
    heads: int
    seq: int
    head_dim: int
    dtype: str
    causal: bool
    layout: str
    """Order in memory: ``bshd`` (a projection's output, transposed without a copy) or ``bhsd`` (contiguous)."""
    direction: Direction = "fwd"
    head_dim_v: int | None = None
    """The width of v and out where it is not head_dim."""
    heads_kv: int | None = None
    """Key/value heads where they are fewer (GQA); None: as many as query heads."""
    window: int | None = None
    """The keys that a query of a causal cell sees, its own the last of them; None: all up to its own."""
    feature: features.Feature = "none"
    allowed: ClassVar[tuple[features.Feature, ...]] = features.FEATURES

    def __post_init__(self) -> None:
        if self.direction not in DIRECTIONS:
            raise ValueError(f"direction: got {self.direction!r}; allowed {', '.join(DIRECTIONS)}")
        if self.head_dim_v is not None and not 0 < self.head_dim_v != self.head_dim:
            raise ValueError(f"head_dim_v: got {self.head_dim_v}; allowed None, or other than head_dim={self.head_dim}")
        if self.heads_kv is not None and not (0 < self.heads_kv < self.heads and self.heads % self.heads_kv == 0):
            allowed = f"None, or a divisor of heads={self.heads} below it"
            raise ValueError(f"heads_kv: got {self.heads_kv}; allowed {allowed}")
        if self.window is not None and not (self.causal and self.window > 0):
            raise ValueError(f"window: got {self.window}; allowed None, or 1 and more of a causal cell")
        if self.feature not in self.allowed:
            raise ValueError(f"feature: got {self.feature!r}; allowed {', '.join(self.allowed)}")
        if self.lists is not None and (self.causal or self.seq % (step := block_lists.multiple(self.lists))):
            told = f"seq={self.seq} causal={self.causal} with {self.feature}"
            raise ValueError(f"lists: got {told}; allowed multiples of {step}, not causal")
        if self.has_documents and self.seq < features.DOCUMENTS:
            raise ValueError(f"seq: got {self.seq}; allowed {features.DOCUMENTS} and more, of as many documents")

    @property
    def heads_text(self) -> str:
        """``16``, or ``16/2`` of 16 query heads on 2 key/value heads."""
        return f"{self.heads}" if self.heads_kv is None else f"{self.heads}/{self.heads_kv}"

    @property
    def width_v(self) -> int:
        """The width of v and out."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def widths(self) -> HeadDims:
        """The head_dim of q and k, and that of v and out; as text ``128``, or ``192/128``."""
        return HeadDims(self.head_dim, self.width_v)

    @property
    def group(self) -> int:
        """Query heads of a key/value head."""
        return self.heads // (self.heads_kv or self.heads)

    @property
    def band(self) -> Band:
        """The mask, but for that of documents; a window that hides nothing is none."""
        if not self.causal:
            return FULL
        return CAUSAL if self.window is None else Band(self.window - 1, 0).within(self.seq, self.seq)

    @property
    def mask(self) -> str:
        """``full``, ``causal`` or ``window:1023:0``."""
        return str(self.band)

    @property
    def attention(self) -> str:
        """The mask, and the feature if there is one: ``causal alibi``."""
        return self.mask if self.feature == "none" else f"{self.mask} {self.feature}"

    @property
    def pass_of(self) -> Pass:
        """``backward`` where that alone is timed, else ``forward``."""
        return "backward" if self.direction == "bwd" else "forward"

    @property
    def has_sinks(self) -> bool:
        """True if each head has a sink."""
        return self.feature == "sinks"

    @property
    def has_documents(self) -> bool:
        """True if queries see the keys of their own document, or sequence of a packed batch, only."""
        return self.feature == "documents16" or self.is_packed

    @property
    def lists(self) -> features.Lists | None:
        """The block mask that the cell has beside its band, or for its packed batch; None for none."""
        return next((it for it in features.LISTS if it == self.feature), None)

    @property
    def is_packed(self) -> bool:
        """True for sequences packed one after another: the documents."""
        return self.feature.startswith("packed")

    @property
    def document_lengths(self) -> tuple[int, ...]:
        """Lengths of the documents in a sequence: one of all without the feature."""
        if self.is_packed:
            return features.packed_lengths(self.feature, self.seq)
        return features.draw_lengths(self.seq) if self.has_documents else (self.seq,)

    @property
    def visible_pairs(self) -> int:
        """(query, key) pairs that count, of one head of one batch entry."""
        if self.lists is not None:
            return block_lists.count_pairs(self.lists, self.seq)
        return sum(self.band.count_pairs(length, length) for length in self.document_lengths)

    @property
    def total_pairs(self) -> int:
        """Pairs that count, of one head of all batch entries."""
        return self.batch * self.visible_pairs

    @property
    def key(self) -> str:
        """The name of the cell in results and on the terminal; distinct for distinct cells."""
        sizes = f"B{self.batch} H{self.heads_text} N{self.seq} D{self.widths} {self.dtype}"
        name = f"{sizes} {self.attention} {self.layout}"
        return name if self.direction == "fwd" else f"{name} {self.direction}"

    @property
    def problem(self) -> Problem:
        """The Problem of `tensors`, made of memory that is reserved and not touched."""
        return self.problem_of(self._made(torch.empty, "cpu"))

    def problem_of(self, tensors: Tensors) -> Problem:
        """The Problem of these tensors, as `multiattn.fmha` would make it."""
        return problem_of(*self.asked(tensors))

    def asked(self, tensors: Tensors) -> tuple[Operands, Options]:
        """A forward of these tensors, as the public call reads `arguments`."""
        (q, k, v, *_), given = tensors, self.arguments(tensors)
        dout = None  # who asks for a gradient has lists of both walks
        if self.direction != "fwd":
            dout = self._shaped(torch.empty, self.heads, self.widths[1], device=q.device)
        if self.is_packed:
            q, k, v = map(of_batch_of_one, (q, k, v))
            dout = None if dout is None else of_batch_of_one(dout)
            operands, options = packed_call(q, k, v, given, Lengths.of(given), dout)
        else:
            operands, options = dense_call(Operands(q, k, v, dout=dout), given)
        return operands._replace(dout=None), options

    def arguments(self, tensors: Tensors) -> dict[str, Any]:
        """The keyword arguments of `multiattn.fmha`, or `fmha_varlen`, behind q, k and v."""
        device = tensors[0].device
        if self.is_packed:
            cu_seqlens, longest = self.cu_seqlens(device), max(self.document_lengths)
            named = {f"cu_seqlens_{side}": cu_seqlens for side in ("q", "kv")}
            named |= {} if self.lists is None else {"block_mask": _listed(self, device)}
            return {"causal": self.causal, **named, "max_seqlen_q": longest, "max_seqlen_kv": longest}
        if self.has_documents or self.lists is not None:  # whose mask has the band, too
            return {"causal": False, "block_mask": self.block_mask(device)}
        found: dict[str, Any] = {"causal": self.causal}
        if self.window is not None:
            found["window"] = self.window - 1, None
        if self.has_sinks:
            found["sinks"] = tensors[3]
        if self.feature == "softcap30":
            found["softcap"] = features.SOFTCAP
        if self.feature == "alibi":
            found["alibi_slopes"] = features.slopes_of(self.heads, device)
        return found

    def attend(self, *tensors: torch.Tensor, **more: Any) -> torch.Tensor:
        """The public call of the cell: out, like q but as wide as v. `more` is the backend and the like."""
        (q, k, v, *_), given = tensors, self.arguments(tensors)
        if not self.is_packed:
            out: torch.Tensor = multiattn.fmha(q, k, v, **given, **more)
            return out
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (q, k, v))
        packed: torch.Tensor = multiattn.fmha_varlen(q, k, v, **given, **more)
        return as_batch_of_one(packed)

    def cu_seqlens(self, device: torch.device | str) -> torch.Tensor:
        """The start of each sequence of a packed batch, and the end of the last, int32."""
        starts = torch.tensor((0, *self.document_lengths)).cumsum(0, dtype=torch.int32)
        return starts.to(device)

    def block_mask(self, device: torch.device) -> Any:
        """Flex's BlockMask; None where no key is hidden."""
        if self.lists is not None:
            return _listed(self, device, for_flex=self.is_packed)
        return _block_mask(self, device) if self.band.hides_keys or self.has_documents else None

    def mask_mod(self, device: torch.device | str) -> features.Mod | None:
        """Flex's mask_mod; None where no key is hidden."""
        ids = features.ids_of(self.document_lengths, device) if self.has_documents else None
        return features.make_mask_mod(self.causal, self.window, ids)

    def score_mod(self, device: torch.device | str) -> features.Mod | None:
        """Flex's score_mod; None for none."""
        if self.feature == "alibi":
            return features.make_alibi(features.slopes_of(self.heads, device), self.causal)
        return features.capped if self.feature == "softcap30" else None

    @property
    def _sizes(self) -> tuple[tuple[int, int], ...]:
        """Heads and head_dim of q, k and v."""
        heads_kv, (head_dim, head_dim_v) = self.heads // self.group, self.widths
        return (self.heads, head_dim), (heads_kv, head_dim), (heads_kv, head_dim_v)

    def tensors(self, device: torch.device | str) -> Tensors:
        """q ``[B, H, S, D]``, k ``[B, Hkv, S, D]`` and v ``[B, Hkv, S, Dv]``, in memory as `layout` says.

        They are normal values of a fixed seed. A cell with sinks has them as a fourth: fp32 ``[H]``.
        """
        generator = torch.Generator(device=device).manual_seed(self.seq * 1000 + self.head_dim)
        return self._made(functools.partial(torch.randn, generator=generator), device)

    def _made(self, make: Callable[..., torch.Tensor], device: torch.device | str) -> Tensors:
        tensors = tuple(self._shaped(make, *its, device=device) for its in self._sizes)
        return (*tensors, make((self.heads,), device=device)) if self.has_sinks else tensors

    def dout(self, device: torch.device | str) -> torch.Tensor:
        """The gradient of out that a backward is given, made as q is; in memory like out, which lies as q does."""
        generator = torch.Generator(device=device).manual_seed(self.seq * 1000 + self.head_dim + 1)
        return self._shaped(
            functools.partial(torch.randn, generator=generator), self.heads, self.widths[1], device=device
        )

    def _shaped(
        self, make: Callable[..., torch.Tensor], heads: int, width: int, device: torch.device | str
    ) -> torch.Tensor:
        dtype = DTYPES[self.dtype]
        if self.layout == "bhsd":
            return make((self.batch, heads, self.seq, width), dtype=dtype, device=device)
        return make((self.batch, self.seq, heads, width), dtype=dtype, device=device).transpose(1, 2)

    def as_dict(self) -> dict[str, Any]:
        """Fields by name, for JSON; without those that say nothing: None, the feature ``none``, False by default."""
        of_itself = {it.name for it in fields(self) if it.default is False and not getattr(self, it.name)}
        return {name: it for name, it in asdict(self).items() if it not in (None, "none") and name not in of_itself}

    def __str__(self) -> str:
        return self.key


@functools.lru_cache(maxsize=2)
def _block_mask(cell: Cell, device: torch.device) -> Any:
    """Made once for the contenders of a cell."""
    mod = cell.mask_mod(device)
    assert mod is not None
    return multiattn.block_mask(mod, None, None, cell.seq, cell.seq, device=device, block_size=features.BLOCK)


@functools.lru_cache(maxsize=2)
def _listed(cell: Cell, device: torch.device, *, for_flex: bool = False) -> Any:
    """The block mask of the suite `lists`; for Flex it keeps packed sequences apart."""
    assert cell.lists is not None
    ids = features.ids_of(cell.document_lengths, device) if for_flex else None
    return block_lists.make(cell.lists, cell.seq, cell.heads, device, ids)


_PLAIN = Cell(batch=1, heads=16, seq=4096, head_dim=128, dtype="bf16", causal=False, layout="bshd")


def _sized(head_dim: int, seq: int = 4096, **more: Any) -> Cell:
    """A cell of 16k tokens, or of one longer sequence, whose heads are 2048 wide together; `more` are other fields."""
    batch, heads = TOKENS // seq or 1, round(HIDDEN / head_dim)
    return replace(_PLAIN, **{"batch": batch, "heads": heads, "seq": seq, "head_dim": head_dim, **more})


def _both(cells: Iterable[Cell]) -> tuple[Cell, ...]:
    """Each cell with a full and with a causal mask."""
    return tuple(replace(cell, causal=causal) for cell in cells for causal in (False, True))


def _by_length(head_dims: Iterable[int], seqs: Sequence[int]) -> tuple[Cell, ...]:
    return tuple(
        _sized(head_dim, seq, causal=causal) for head_dim in head_dims for causal in (False, True) for seq in seqs
    )


def _heldout() -> tuple[Cell, ...]:
    """Cells that no sweep of configs has seen: other head_dims and lengths, one sequence at a time, fp16, GQA."""
    full = (
        *(_sized(head_dim, seq) for head_dim in (96, 160, 192) for seq in (2048, 8192)),
        *(_sized(head_dim, seq) for head_dim in (64, 128, 256) for seq in (3000, 32768)),
        _PLAIN,
        *(_sized(head_dim, dtype="fp16") for head_dim in (64, 128, 256)),
        *(_sized(128, seq, heads_kv=2) for seq in (2048, 8192)),
    )
    return _both(full)


def _headdims() -> tuple[Cell, ...]:
    """Every head_dim from 40 on at N=4k, and a few in fp16, at a length that no tile divides, and with shared keys."""
    few = ({"dtype": "fp16"}, {"seq": 3000})
    full = (
        *(_sized(head_dim) for head_dim in range(40, 257, 8)),
        *(replace(_sized(head_dim), **more) for head_dim in (40, 88, 112, 208) for more in few),
        *(_sized(head_dim, heads=heads, heads_kv=heads // 4) for head_dim, heads in ((40, 48), (112, 16))),
    )
    return _both(full)


def _features() -> tuple[Cell, ...]:
    """Masks and scores beyond the causal mask, one sequence at a time, forward and then backward."""
    kinds: tuple[dict[str, Any], ...] = (
        {"window": 1024},
        *({"feature": feature} for feature in ("softcap30", "alibi", "sinks")),
    )
    return tuple(
        _sized(head_dim, seq, batch=1, causal=True, direction=direction, **kind)
        for direction in ("fwd", "bwd")
        for kind in kinds
        for head_dim in (128, 64)
        for seq in (4096, 16384, 65536)
    )


def _packed() -> tuple[Cell, ...]:
    """Packed batches of 16k tokens, forward and then backward."""
    return tuple(
        _sized(head_dim, 16384, causal=causal, feature=feature, direction=direction)
        for direction in ("fwd", "bwd")
        for feature in ("packed_equal", "packed_mixed", "packed_one_long")
        for head_dim in (64, 128)
        for causal in (True, False)
    )


def _lists() -> tuple[Cell, ...]:
    """Block masks of sparse training, documents, prefixes, videos and packed sequences, forward and then backward."""
    random: tuple[features.Feature, ...] = ("blocks128_tenth", "blocks128_half", "blocks64_tenth", "blocks64_half")
    plain = (
        *(_sized(128, 40960, feature=it) for it in random),
        _sized(128, 40960, feature="blocks128_top16", heads=64, heads_kv=4),
        *(
            _sized(head_dim, seq, feature="documents16", causal=True, heads=16)
            for seq in (32768, 65536)
            for head_dim in (128, 64)
        ),
        *(_sized(head_dim, 16384, feature="prefix2k", heads=16) for head_dim in (128, 64)),
        *(_sized(head_dim, 24576, feature="video", heads=16) for head_dim in (128, 64)),
        _sized(128, 32768, feature="packed_blocks2k", heads=64, heads_kv=8),
    )
    return tuple(replace(cell, direction=direction) for direction in ("fwd", "bwd") for cell in plain)


def _mla() -> tuple[Cell, ...]:
    """Multi-head latent attention as DeepSeek V3 and its like train and prefill it, forward and then backward."""
    return tuple(
        _sized(192, seq, head_dim_v=128, heads=heads, causal=True, direction=direction)
        for direction in ("fwd", "bwd")
        for heads in (16, 128)
        for seq in (2048, 4096, 8192, 16384, 32768)
    )


def _wide() -> tuple[Cell, ...]:
    """Heads of 512, forward and then backward: 4 of each, and 16 on one, as Gemma 4 has them in its global layers."""
    return tuple(
        _sized(512, seq, heads=heads, heads_kv=heads_kv, causal=causal, direction=direction)
        for direction in ("fwd", "bwd")
        for heads, heads_kv in ((4, None), (16, 1))
        for seq in (4096, 16384)
        for causal in (True, False)
    )


_STANDARD = _by_length((64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384))
_BACKWARD = tuple(replace(cell, direction="bwd") for cell in _STANDARD)
SUITES: Mapping[str, tuple[Cell, ...]] = {
    "standard": _STANDARD,
    # Sweeps at head_dims between those of the standard suite speak for all that are like them.
    "between": _by_length((80, 144, 176), (1024, 4096, 16384)),
    "heldout": _heldout(),
    "headdims": _headdims(),
    # Of the cuTile FMHA scaling analysis (DGX Spark playbook): what chains of rungs are climbed on.
    "seed": tuple(
        Cell(batch=4, heads=32, seq=seq, head_dim=128, dtype="fp16", causal=True, layout="bhsd")
        for seq in (1024, 2048, 4096, 8192, 16384)
    ),
    # Of flash-attn-mma (LeetCUDA): what the points of CUDA's axes are timed on.
    "points": tuple(
        Cell(batch=1, heads=heads, seq=8192, head_dim=head_dim, dtype="fp16", causal=False, layout="bhsd")
        for head_dim, heads in ((64, 8), (128, 8), (512, 48), (1024, 16))
    ),
    "backward": _BACKWARD,
    "features": _features(),
    "packed": _packed(),
    "lists": _lists(),
    "mla": _mla(),
    "wide": _wide(),
    "floors": tuple(it for it in (*_STANDARD, *_BACKWARD) if it.head_dim == 128 and it.seq == 4096),
    "smoke": tuple(
        Cell(batch=1, heads=2, seq=256, head_dim=head_dim, dtype=dtype, causal=causal, layout="bshd")
        for head_dim, dtype in ((64, "bf16"), (128, "fp16"))
        for causal in (False, True)
    ),
}
"""Every suite by name."""


def in_directions(cells: tuple[Cell, ...], directions: Sequence[Direction]) -> tuple[Cell, ...]:
    """The problems of `cells` in each direction, one direction after the other; without any, `cells` as they are."""
    turned = (replace(cell, direction=direction) for direction in directions for cell in cells)
    return tuple(dict.fromkeys(turned)) or cells


def narrowed(cells: tuple[Cell, ...], **wanted: Sequence[Any]) -> tuple[Cell, ...]:
    """The cells whose fields have one of the wanted values; a field for which none is given is not asked.

    InputError, naming what there is, for a value that no cell has.
    """
    for name, values in wanted.items():
        there = {getattr(cell, name) for cell in cells}
        if wrong := [value for value in values if value not in there]:
            have = ", ".join(map(str, sorted(there)))
            raise InputError(f"{name}: got {', '.join(map(str, wrong))}; this suite has {have}")
    return tuple(
        cell for cell in cells if all(not values or getattr(cell, name) in values for name, values in wanted.items())
    )


# ---------------------------------------------------------------- work


def forward_flops(cell: Cell) -> int:
    """FLOP of one forward: products of ``2*D`` and ``2*Dv`` FLOP per visible (query, key) pair, of every query head.

    Masked pairs do not count, so a causal kernel gains nothing by computing them. Exponentials do not count, nor does
    what a feature makes of a score.
    """
    return cell.heads * cell.total_pairs * flops_per_pair(*cell.widths)


def cell_flops(cell: Cell) -> int:
    """FLOP of a cell in its direction. A backward has five products: scores again, dv, dp, dk and dq.

    A backward that computes scores and dp twice gets no credit for it, so that rates compare times (Dao,
    "FlashAttention-2", section 4.1).
    """
    forward = forward_flops(cell)
    backward = cell.heads * cell.total_pairs * flops_per_pair(*cell.widths, backward=True)
    return {"fwd": forward, "bwd": backward, "fwdbwd": forward + backward}[cell.direction]


def tflops(flops: int, time_ms: float) -> float:
    """10^12 FLOP per second. ValueError for a time that no launch can take."""
    if time_ms <= 0:
        raise ValueError(f"time_ms: got {time_ms}; a measured time is positive")
    return flops / time_ms / 1e9


def rate_text(rate: float) -> str:
    """TFLOPS for a table: whole numbers, but two digits of a rate below ten, so that none reads as 0."""
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"
