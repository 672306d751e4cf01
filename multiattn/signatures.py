"""Options of the public calls. Each has one type here, for all of them; `multiattn.fmha` alone spells its own out."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar

import torch

from multiattn.mask import Window
from multiattn.meant import refuses_calls
from multiattn.operands import Operands, Options, ScoreMod, with_score
from multiattn.plan.backend import BackendName, Direction

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

F = TypeVar("F", bound=Callable[..., Any])


class BandOptions(TypedDict, total=False):
    """Options of every call and of layers."""

    causal: bool
    window: Window | None
    scale: float | None
    softcap: float | None


class Common(BandOptions, total=False):
    """Options of every call."""

    sinks: torch.Tensor | None


class BackendOptions(TypedDict, total=False):
    """The option of all that runs a kernel."""

    backend: BackendName


class Selection(BackendOptions, total=False):
    """Options of calls that run a kernel."""

    variant: str | None


class ScoreOptions(Common, total=False):
    """Options of calls with any scores and masks."""

    alibi_slopes: torch.Tensor | None
    bias: torch.Tensor | None
    score_mod: ScoreMod | None
    block_mask: BlockMask | None


class CallOptions(ScoreOptions, Selection, total=False):
    """Options of `multiattn.fmha`, without `return_lse`, on which the type of its result depends."""

    dropout_p: float
    dropout_seed: int | torch.Tensor | None
    deterministic: bool | None


class PackedLengths(TypedDict):
    """The lengths that a packed batch needs."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    max_seqlen_q: int
    max_seqlen_kv: int


class PackedOptions(CallOptions, PackedLengths, total=False):
    """Options of `multiattn.fmha_varlen`."""


class CachedLengths(TypedDict):
    """The lengths that a cache needs."""

    seqlens_kv: torch.Tensor


class CacheOptions(ScoreOptions, Selection, CachedLengths, total=False):
    """Options of `multiattn.fmha_kvcache`."""

    page_table: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    max_seqlen_q: int | None
    num_splits: int | None
    out: torch.Tensor | None
    k_scale: float | torch.Tensor | None
    v_scale: float | torch.Tensor | None


class ExplainOptions(CallOptions, total=False):
    """Options of `multiattn.explain`: those of the call that it explains."""

    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_kv: torch.Tensor | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    seqlens_kv: torch.Tensor | None
    page_table: torch.Tensor | None
    num_splits: int | None
    k_scale: float | torch.Tensor | None
    v_scale: float | torch.Tensor | None
    return_max: bool
    arch: str | None
    direction: Direction


class ReferenceOptions(ScoreOptions, total=False):
    """Options of `multiattn.reference` and of its gradient."""

    compute_dtype: torch.dtype


class ReferenceResults(ReferenceOptions, total=False):
    """Options of `multiattn.reference`."""

    return_max: bool


class PaddedOptions(Common, BackendOptions, total=False):
    """Options of `multiattn.integrations.padding.fmha_padded`."""

    alibi_slopes: torch.Tensor | None
    deterministic: bool | None


class LayerOptions(BandOptions, BackendOptions, total=False):
    """Options of `multiattn.nn.Attention` that are of its calls."""


DEFAULTS: Mapping[str, object] = {
    "causal": False,
    "dropout_p": 0,  # no 0.0, for which torch.compile(dynamic=True) has a symbol and compiles twice
    "backend": "auto",
    "return_max": False,
    "direction": "forward",
    "compute_dtype": torch.float32,
}
"""Values of options that a call leaves out; None for all others."""


class Scores(NamedTuple):
    """All that changes or hides scores, beside the band of a mask and the scale, as `with_score` takes it."""

    softcap: float | None
    alibi_slopes: torch.Tensor | None
    bias: torch.Tensor | None
    score_mod: ScoreMod | None
    block_mask: BlockMask | None


_SCORES = frozenset(Scores._fields)
PLAIN = Scores(None, None, None, None, None)
"""Nothing."""


def names_of(options: type) -> frozenset[str]:
    """The names of a TypedDict."""
    return frozenset(options.__annotations__)


def takes(options: type, absent: object = None) -> Callable[[F], F]:
    """A decorator of a call with ``**options``: its signature shows each of them, and it `refuses_calls`."""
    needed = options.__required_keys__  # type: ignore[attr-defined]  # a TypedDict has it
    shown = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if name in needed else DEFAULTS.get(name),
            annotation=it.__forward_arg__,
        )
        for name, it in options.__annotations__.items()
    ]
    return functools.partial(refuses_calls, absent=absent, options=shown)


def settled(options: Mapping[str, Any]) -> tuple[Options, Scores]:
    """The arguments of a call, validated, and its scores as they came."""
    given = options.get
    asked = Options.of(
        causal=given("causal", False),
        window=given("window"),
        scale=given("scale"),
        has_sinks=given("sinks") is not None,
        dropout_p=given("dropout_p", 0),
        backend=given("backend", "auto"),
        variant=given("variant"),
        deterministic=given("deterministic"),
    )
    return asked, PLAIN if _SCORES.isdisjoint(options) else Scores(*map(given, Scores._fields))


def dense_call(operands: Operands, options: Mapping[str, Any]) -> tuple[Operands, Options]:
    """The operands and options of a call of `fmha` of these tensors. TypeError or ValueError, naming what came."""
    asked, scores = settled(options)
    return with_score(operands._replace(sinks=options["sinks"]) if asked.has_sinks else operands, asked, *scores)
