"""The configs of Hopper's kernels for heads wider than 256; every rule with its evidence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from multiattn.cuda.backward_wgmma_wide import WgmmaWideConfig
from multiattn.cuda.decode_mma import LONE_MAX
from multiattn.cuda.decode_twin import SplitTwinConfig
from multiattn.cuda.forward_twin import HEAD_DIM_MAX, HEAD_DIM_V_MAX, TwinConfig
from multiattn.plan.config import COMPILED, C, Rule

_H200 = "H200 2026-11-30, bf16: "
_EMULATED = "emulated: as on sm90; split_keys and tiling build and run faster"


def _rule(arch: str, config: C, why: str, **where: Any) -> Rule[C]:
    bounds = {"head_dim_min": 257, "head_dim_max": HEAD_DIM_MAX, "head_dim_v_max": HEAD_DIM_V_MAX, **where}
    return Rule(arches=(arch,), config=config, why=why, **bounds)


_sm90 = partial(_rule, "sm90")
_emulated = partial(_rule, "cpu", why=_EMULATED, only_named=True)

_FORWARD = TwinConfig(tile_m=64, tile_n=64)
TWIN_RULES: tuple[Rule[TwinConfig], ...] = (
    _sm90(
        replace(_FORWARD, piece=64),
        _H200 + "D=320 N=2048 causal 361 TFLOPS, pieces of 192 columns 341, of 128 330",
        head_dim_max=320,
    ),
    _sm90(
        _FORWARD,
        _H200
        + "full / causal, and with tiling of q, k and v: D=512 N=512 458 / 326 TFLOPS, 279 / 164; D=384 N=4096 669, "
        "298; D=320 N=2048 365, 265; D=264 N=2048 causal 251, 149; D=512 N=4096 712 / 601, N=16384 747 / 623",
    ),
    _emulated(config=_FORWARD),
)
"""First match wins."""

_BOXES, _GATHERED = (SplitTwinConfig(tile_m=64, tile_n=64, gathers=gathers) for gathers in (False, True))
_LATENT = _H200 + "576/512, v in k, B=64 16 heads 8k 154.0 us, pages of 64 154.8, of 16 177.9; B=16 128 heads 73.4 us"
_LATENT_GATHERED = _H200 + "576/512, v in k, B=64 16 heads 8k, pages of 16: 203.7 us, boxes 177.9"
_WIDE = (
    _H200
    + "D=512 4k and split_keys: B=16 64/2 77.6 us, 121; B=16 64/1 52.5, 110; B=8 16/1, 3 queries 28.8, 54.4. With 16 "
    "rows that is faster: B=1 16/1 8k 16.9, this 20.2; B=32 16/4 4k, pages of 16 249.8, 269.8"
)
_WIDE_GATHERED = "a guess: as 576/512 has it"
_ROWS_MAX = 64
"""Beyond it, where keys are in no cache, blocks that own queries fill the GPU. H200 2026-11-30, D=512, B=16 16/1, 64
queries of 8k keys: 421 us, 441 as rows of groups."""


def _decode() -> Iterator[Rule[SplitTwinConfig]]:
    """Rules for plain calls of few rows, then for caches; of pages that boxes fit, then of any."""
    wide = {"head_dim_max": 512, "rows_min": 17}
    for plain in ({"rows_max": _ROWS_MAX, "lone_max": LONE_MAX}, {"cached": True}):
        yield _sm90(_BOXES, _LATENT, head_dim_min=513, page_multiple=16, **plain)
        yield _sm90(_GATHERED, _LATENT_GATHERED, head_dim_min=513, **plain)
        yield _sm90(_BOXES, _WIDE, page_multiple=16, **wide, **plain)
    yield _sm90(_GATHERED, _WIDE_GATHERED, cached=True, **wide)


SPLIT_TWIN_RULES: tuple[Rule[SplitTwinConfig], ...] = (
    *_decode(),
    _emulated(config=replace(_BOXES, keys_min=64), page_multiple=8),
    _emulated(config=replace(_GATHERED, keys_min=64)),
)
"""First match wins."""

_BACKWARD = WgmmaWideConfig(tile_m=64, tile_n=256)
_NARROW = "a guess: up to 256 columns gradients stay in registers"
_BACKWARD_BIAS = replace(_BACKWARD, tile_n=128, score_stages=6)
WIDE_BACKWARD_RULES: tuple[Rule[WgmmaWideConfig], ...] = (
    _sm90(
        _BACKWARD_BIAS,
        COMPILED + "a bias has no spills, with tiles of 256 keys 66 in a tile of plain scores 12",
        head_dim_max=512,
        scored=True,
        reads_keys=True,
    ),
    _sm90(
        _BACKWARD,
        _H200
        + "4 heads of D=512 and two passes of mma.sync: N=4096 full 534, 132 TFLOPS, causal 463, 124; N=16384 full "
        "546, 134, causal 525, 143; 16 heads on one N=16384 causal 526, 144; 32 heads N=1024 causal 308, 122. Tiles of "
        "128 keys: kernels of N=4096 2754 us, this 2448",
        head_dim_max=512,
    ),
    _sm90(_BACKWARD, _NARROW, head_dim_min=1, head_dim_max=256, only_named=True),
    _emulated(config=_BACKWARD, head_dim_min=1, head_dim_max=512),
)
"""First match wins."""
