"""Tables of a few of a list's points: the climb to an offered one, its neighbours on each axis, the SRAM of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.ladder_list import Listing, point_line, points_header
from bench.ladder_rungs import points_of
from multiattn import backend as registry
from multiattn.backend import Variant, ladder
from multiattn.cuda.axes import Axes
from multiattn.cuda.configs import CudaConfig, Pieces
from multiattn.problem import Problem
from parity.report import Table


def climb_tables(listing: Listing) -> list[Table]:
    """The rungs up to the variant that a caller gets in the listing's cell; nothing where it has no time."""
    top = _default(listing)
    if top is None:
        return []
    names = [rung.name for rung in ladder(registry.get(listing.backend), top.name)]
    note = "Each rung has one thing more than the one above it."
    return [_table(f"The climb to {top.name}: {listing.title}", note, listing, names)]


def neighbour_tables(listing: Listing) -> list[Table]:
    """The points that differ on one axis only from the variant that a caller gets in the listing's cell."""
    top = _default(listing)
    if top is None:
        return []
    flags = dict(top.flags)
    names = [
        variant.name
        for variant in points_of(registry.get(listing.backend))
        if sum(flags[axis] != value for axis, value in variant.flags) <= 1
    ]
    note = f"{top.name}, and what a change on one axis makes of it."
    return [_table(f"Around {top.name}: {listing.title}", note, listing, names)]


def _default(listing: Listing) -> Variant | None:
    """The first offered point that was timed there: what a caller gets of them who names none."""
    offered = (it for it in points_of(registry.get(listing.backend)) if not it.only_named)
    return next((it for it in offered if listing.measured(f"{listing.backend}/{it.name}") is not None), None)


def _table(title: str, note: str, listing: Listing, names: Iterable[str]) -> Table:
    """The lines of `names`, in their order, of those that run."""
    known = {variant.name: variant for variant in listing.variants if not listing.refusal(variant.name)}
    rows = tuple(point_line(listing, known[name]) for name in names if name in known)
    return Table(title=title, note=note, header=points_header(listing), rows=rows)


# ---------------------------------------------------------------- shared memory


SRAM: tuple[tuple[str, str, str, str], ...] = (
    ("none", "none", "M*D + s*(N*D + N*D)", "-"),
    ("kv", "none", "M*D + s*N*D", "-"),
    ("qkv", "none", "max(M*D, s*N*D)", "-"),
    ("none", "qk", "M*D + s*N*d + N*D", "s*(M*d + N*d) + N*D"),
    ("none", "qkv", "M*D + s*N*d + s*n*D", "s*(M*d + N*d) + s*n*D"),
    ("kv", "qk", "M*D + s*max(N*d, N*D)", "s*max(M*d + N*d, N*D)"),
    ("kv", "qkv", "M*D + s*max(N*d, n*D)", "s*max(M*d + N*d, n*D)"),
)
"""share, tiling, and 16-bit elements of shared memory with Q whole and with Q streamed; Python, so that a test can ask.

M x N: the tile; D: head_dim, padded; s: stages; d: dim_slice; n: key_slice. split_kv adds `EXCHANGED`.
"""

EXCHANGED = "M*N + 2*c*M"
"""What warps that share rows exchange, c of them: weights, and an fp32 a row and warp for maxima and sums."""


def formula(axes: Axes, config: CudaConfig) -> str:
    """The expression of a legal point with a config."""
    whole, streamed = next(row[2:] for row in SRAM if row[:2] == (axes.share, axes.tiling))
    own = streamed if config.q_streamed else whole
    return own if axes.warps == "split_q" else f"{own} + {EXCHANGED}"


def evaluate(expression: str, axes: Axes, config: CudaConfig, problem: Problem) -> int:
    """Bytes that an expression of `SRAM` comes to. D is padded as K or V needs it, which must be the same here."""
    pieces = Pieces.of(axes, config, problem)
    assert pieces.q_width == pieces.v_width, "the formulas have one D"
    values = {
        "M": config.tile_m,
        "N": config.tile_n,
        "D": pieces.q_width,
        "s": config.stages,
        "d": config.dim_slice,
        "n": config.key_slice,
        "c": config.column_warps,
        "max": max,
    }
    return 2 * int(eval(expression, {"__builtins__": {}}, values))


def sram_table() -> Table:
    """The formulas, with bytes at D=512 of 64x64 tiles and two stages, slices of 64 elements and 16 keys."""
    problem = Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=512)
    config = CudaConfig(tile_m=64, tile_n=64, warps=4, stages=2)
    rows: list[Sequence[str]] = []
    for share, tiling, whole, streamed in SRAM:
        axes = Axes(warps="split_q", share=share, tiling=tiling)
        texts = (whole, streamed)
        cells = ["-" if text == "-" else f"`{text}`: {evaluate(text, axes, config, problem)}" for text in texts]
        rows.append((share, tiling, *cells))
    return Table(
        title="Shared memory of a block",
        note=(
            "In 16-bit elements, and bytes at D=512 with 64x64 tiles, two stages, slices of 64 elements and 16 keys. "
            f"M x N: the tile; s: stages; d: dim_slice; n: key_slice. split_kv adds `{EXCHANGED}` with c warps a row."
        ),
        header=("share", "tiling", "Q whole or in registers", "Q streamed"),
        rows=tuple(tuple(row) for row in rows),
    )
