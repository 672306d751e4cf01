"""Tiles and compiler hints per arch: the rules, with what each is based on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from multiattn.cutile.configs import CutileConfig
from multiattn.cutile.steps import STEPS
from multiattn.plan.config import COMPILED, Rule, inherit

_H200 = "H200, 2026-11-21, tileiras 13.4, B4 N=4096 H*D=2048 bf16, best of the candidates: "

_LAZY = "H200, 2026-11-23, tileiras 13.4, 16k tokens H*D=2048 bf16, of 246 candidates of one experiment: "

_LANDED = "H200, 2026-11-23, tileiras 13.4, 16k tokens H*D=2048 bf16, of this kernel's candidates: "

_SWEPT = "H200, 2026-11-23, tileiras 13.4, 16k tokens H*D=2048 bf16, finals of a sweep: "

_AGAIN = "H200, 2026-11-23, tileiras 13.4, 16k tokens H*D=2048 bf16, best of 10 to 40 (docs/experiments.md): "

_TOKENS = "tileiras 13.4, 16k tokens H*D=2048 bf16, kernels in turns (docs/experiments.md): "

_IN_TURNS = "H200, 2026-11-23, " + _TOKENS

_NO_REPAIR = "H200, 2026-11-24, tileiras 13.4, 16k tokens H*D=2048 bf16, kernels in turns: "

_LAZY_64X64 = CutileConfig(tile_m=64, tile_n=64, occupancy=2, lazy_max=True)
"""For short tiles, two to four blocks an SM, but for the order of tiles and blocks."""

_LAZY_64X128 = CutileConfig(tile_m=64, tile_n=128, occupancy=2, lazy_max=True)
"""For full problems of 128 columns, but for the order of tiles and blocks."""

_LAZY_128X64 = CutileConfig(tile_m=128, tile_n=64, occupancy=1, num_worker_warps=8, lazy_max=True)
"""For the widest head_dims, and split, two blocks an SM, for D=72; but for the order of tiles and blocks."""

_LAZY_128X128 = CutileConfig(tile_m=128, tile_n=128, occupancy=1, num_worker_warps=8, lazy_max=True)
"""For long causal problems, D=104 and 120, and split for others between powers of two, but for the order of tiles."""

_AHEAD_256 = replace(_LAZY_128X64, split_head_dim=True, pipeline="ahead", k_latency=1, v_latency=1)
"""For short causal problems of D=193 to 256, but for the order of tiles: from N=1k as many heads as have 16k keys."""

_AHEAD_128X128 = replace(_LAZY_128X128, split_head_dim=True, pipeline="ahead", k_latency=1, v_latency=1)
"""For D=88 and 129 to 192, but for the order of tiles."""


def _without_latencies(config: CutileConfig) -> CutileConfig:
    return replace(config, k_latency=None, v_latency=None)


def _hopper(
    head_dims: tuple[int, int],
    *,
    whole_sectors: bool | None = None,
    banded: bool,
    dtype: str | None = None,
    seq_min: int = 0,
    seq_max: int | None = None,
    config: CutileConfig,
    why: str,
) -> Rule[CutileConfig]:
    """A rule of sm90, for head_dims from one to another."""
    return Rule(
        arches=("sm90",),
        head_dim_min=head_dims[0],
        head_dim_max=head_dims[1],
        whole_sectors=whole_sectors,
        banded=banded,
        dtype=dtype,
        seq_min=seq_min,
        seq_max=seq_max,
        config=config,
        why=why,
    )


FULL_RULES: tuple[Rule[CutileConfig], ...] = (
    Rule(
        arches=("cpu",),
        config=CutileConfig(tile_m=64, tile_n=64),
        why="interpreted: small enough that a short sequence still has several blocks of keys and a ragged one",
    ),
    _hopper(
        (1, 64),
        banded=False,
        seq_max=512,
        config=replace(_LAZY_64X64, occupancy=4, heads_together=8, scheduler="static"),
        why=_IN_TURNS + "N=512: 443 TFLOPS, cuDNN 370; 4 heads together 428, a block a tile 407",
    ),
    _hopper(
        (1, 64),
        banded=False,
        config=replace(_LAZY_64X64, occupancy=4, heads_together=4),
        why=_LAZY
        + "N=1k 457, 4k 501, 16k 521 TFLOPS, cuDNN 384, 391, 397; 128x64 with 8 warps 476 at 4k; static 433 at 1k",
    ),
    _hopper(
        (1, 64),
        banded=True,
        seq_min=8192,
        config=replace(_LAZY_64X64, occupancy=4, heads_together=8),
        why=_LAZY + "N=16k: 542 TFLOPS, cuDNN 394; 32 heads together 525; pairs at occupancy 3 491",
    ),
    _hopper(
        (1, 64),
        banded=True,
        config=replace(_LAZY_64X64, occupancy=4, heads_together=32),
        why=_LAZY
        + "N=512 268, 1k 363, 4k 462 TFLOPS, cuDNN 245, 296, 348; online 266, 332, -; 4 heads together 436 at 4k",
    ),
    _hopper(
        (65, 96),
        whole_sectors=True,
        banded=False,
        config=replace(_LAZY_64X64, occupancy=3, heads_together=2, split_head_dim=True),
        why=_IN_TURNS
        + "D=80 N=4k 520, 16k 546 TFLOPS, cuDNN 399, 416; 128x64, two blocks an SM, 516, 534; 128x128 421, 445; one "
        + "tile of 128 columns 425, 400",
    ),
    _hopper(
        (65, 80),
        whole_sectors=False,
        banded=False,
        config=replace(_LAZY_128X64, occupancy=2, heads_together=2, split_head_dim=True),
        why=_IN_TURNS + "D=72 N=8k: 483 TFLOPS, cuDNN 381; 128x128 396, 64x64 302",
    ),
    _hopper(
        (81, 96),
        whole_sectors=False,
        banded=False,
        config=replace(_AHEAD_128X128, heads_together=2),
        why=_IN_TURNS
        + "D=88 N=8k 485 TFLOPS, cuDNN 452; not a block ahead 449; in another run N=16k 472, 128x64, two blocks an SM, "
        + "431, 64x64 298, one tile 405",
    ),
    _hopper(
        (65, 96),
        whole_sectors=True,
        banded=True,
        config=replace(_LAZY_64X64, occupancy=3, heads_together=8, split_head_dim=True),
        why=_IN_TURNS
        + "D=80, of 26 heads 13 together, N=4k 490, 16k 523 TFLOPS, cuDNN 348, 347; 128x64, two blocks an SM, 492, "
        + "515; 128x128 373, 382; one tile 362, 368",
    ),
    _hopper(
        (65, 80),
        whole_sectors=False,
        banded=True,
        config=replace(_LAZY_128X64, occupancy=2, heads_together=8, split_head_dim=True),
        why="a guess, as full problems of D=72; at D=80 causal N=4k 492, 16k 515 TFLOPS, 64x64 490, 523, 128x128 373, "
        "382",
    ),
    _hopper(
        (81, 96),
        whole_sectors=False,
        banded=True,
        config=replace(_LAZY_128X128, heads_together=8, split_head_dim=True),
        why=_AGAIN
        + "D=88, of 26 heads 2 together, N=4k 382, 16k 426 TFLOPS, cuDNN 396, 427; without latencies 374, 424; one "
        + "tile 371, 409; in another run N=8k 415, a block ahead 412",
    ),
    _hopper(
        (97, 128),
        whole_sectors=False,
        banded=False,
        config=replace(_LAZY_128X128, heads_together=2),
        why=_IN_TURNS + "D=104 N=8k: 487 TFLOPS, cuDNN 530; 64x64 in pairs 287, 64x128 a block ahead 283",
    ),
    _hopper(
        (97, 128),
        whole_sectors=False,
        banded=True,
        seq_max=4095,
        config=replace(_LAZY_128X128, heads_together=8),
        why=_IN_TURNS + "D=104 N=2k: 381 TFLOPS, cuDNN 414; 64x64 in pairs 252",
    ),
    _hopper(
        (97, 128),
        banded=False,
        dtype="bf16",
        seq_max=724,
        config=replace(_LAZY_64X128, heads_together=8, scheduler="static", pipeline="pilot"),
        why=_IN_TURNS + "N=512: 491 TFLOPS, cuDNN 530; 4 heads together 488, without a pilot 486",
    ),
    _hopper(
        (97, 128),
        banded=False,
        seq_max=724,
        config=replace(_LAZY_64X128, heads_together=4, scheduler="static"),
        why=_IN_TURNS + "N=512: 480 TFLOPS, cuDNN 513; 2 heads together 478; a pilot 476, with 8 heads together 483",
    ),
    _hopper(
        (97, 128),
        banded=False,
        dtype="bf16",
        seq_max=1448,
        config=replace(_LAZY_64X128, heads_together=4, scheduler="static", pipeline="pilot"),
        why=_IN_TURNS + "N=1k: 566 TFLOPS, cuDNN 555; 1 head at a time 545, without a pilot 545 to 547",
    ),
    _hopper(
        (97, 128),
        banded=False,
        config=replace(_LAZY_64X128, pipeline="ahead"),
        why=_LAZY
        + "N=4k 625, 16k 680 TFLOPS, cuDNN 594, 612; 128x128 with 8 warps 615, 663; 2 heads together 610, 647",
    ),
    _hopper(
        (97, 128),
        banded=True,
        seq_max=724,
        config=replace(
            _LAZY_64X64,
            heads_together=2,
            scheduler="static",
            pipeline="pairs",
            k_latency=1,
            v_latency=1,
            q_in_registers=True,
        ),
        why=_NO_REPAIR + "N=512: 1.077 of one by one, which had 324 TFLOPS before, cuDNN 343; apart 0.99",
    ),
    _hopper(
        (97, 128),
        banded=True,
        seq_max=4095,
        config=replace(_LAZY_64X64, heads_together=8, pipeline="pairs", k_latency=1, v_latency=1),
        why=_IN_TURNS
        + "N=1k 413, 2k 502 TFLOPS, cuDNN 416, 465; latencies of 2 and 4, one by one, 408, -; without latencies 405, "
        + "490; latencies of 1 at 4k 581, 128x128 590",
    ),
    _hopper(
        (97, 128),
        banded=True,
        seq_max=5792,
        config=replace(_LAZY_128X128, heads_together=4, q_in_registers=True),
        why=_NO_REPAIR + "N=4k: 1.040 of q in shared memory, without latencies 1.017, in pairs 1.001",
    ),
    _hopper(
        (97, 128),
        banded=True,
        dtype="bf16",
        config=_without_latencies(replace(_LAZY_128X128, heads_together=8, pipeline="pilot", q_in_registers=True)),
        why=_NO_REPAIR + "N=8k, 16k: 1.029, 1.027 of q in shared memory; without a pilot 1.039 at 8k alone",
    ),
    _hopper(
        (97, 128),
        banded=True,
        config=_without_latencies(replace(_LAZY_128X128, heads_together=8, pipeline="pairs")),
        why=_AGAIN + "in bf16, N=8k 613, 16k 643 TFLOPS, cuDNN 524, 536; one by one 596, 618",
    ),
    _hopper(
        (161, 192),
        banded=False,
        dtype="bf16",
        seq_max=724,
        config=replace(_AHEAD_128X128, heads_together=2, pipeline="pilot"),
        why=_NO_REPAIR + "D=192 N=512: 1.080 of a block ahead, that with 8 heads together 1.049",
    ),
    _hopper(
        (129, 192),
        banded=False,
        config=replace(_AHEAD_128X128, heads_together=2),
        why=_IN_TURNS
        + "N=2k, 8k: D=144 578, 636 TFLOPS, cuDNN 468, 490, not a block ahead 552, 606; D=176 559, 601, cuDNN 550, "
        + "564, not a block ahead 540, 587; at 16k D=176 629 for 617",
    ),
    _hopper(
        (129, 192),
        banded=True,
        dtype="bf16",
        config=replace(_AHEAD_128X128, heads_together=8),
        why=_IN_TURNS
        + "N=2k, 8k: D=144, of 14 heads 7 together, 481, 607 TFLOPS, cuDNN 403, 448, not a block ahead 464, 569; "
        + "D=176, of 12 heads 6 together, 502, 604, cuDNN 474, 511, not a block ahead 486, 578",
    ),
    _hopper(
        (129, 192),
        banded=True,
        config=replace(_LAZY_128X128, heads_together=8, split_head_dim=True),
        why=_AGAIN
        + "in bf16, N=4k, 16k: D=144, of 14 heads 2 together, 521, 594 TFLOPS, cuDNN 441, 464; D=176, of 12 heads 4 "
        + "together, 562, 613, cuDNN 506, 539; a block ahead spills in fp16, 15 registers in the loop of D=192",
    ),
    _hopper(
        (193, 256),
        banded=False,
        seq_max=512,
        config=CutileConfig(tile_m=128, tile_n=128, occupancy=1, num_worker_warps=8, heads_together=4),
        why=_LAZY + "N=512: 470 TFLOPS, cuDNN 514; lazy 128x64 in pairs, static 453",
    ),
    _hopper(
        (193, 256),
        banded=False,
        dtype="bf16",
        config=replace(_LAZY_128X64, heads_together=4, pipeline="pilot_pairs"),
        why=_AGAIN
        + "N=1k 601, 2k 668, 4k 724, 8k 726, 16k 734 TFLOPS, cuDNN 600, 636, 660, 650, 649; 128x128 588, 649, 699, "
        + "694, 711",
    ),
    _hopper(
        (193, 256),
        banded=False,
        config=replace(_LAZY_128X64, heads_together=4, pipeline="pairs"),
        why=_LAZY
        + "N=1k 569, 4k 676, 16k 734 TFLOPS, cuDNN 585, 619, 655; online 128x128 709 of 779 at 4k in a first pass",
    ),
    _hopper(
        (193, 256),
        banded=True,
        dtype="bf16",
        seq_max=724,
        config=replace(_AHEAD_256, heads_together=8),
        why=_IN_TURNS
        + "N=512: 338 TFLOPS, cuDNN 369; latencies of 2 and 4 331, with 16 or 4 heads together 329; one tile, without "
        + "latencies, 320",
    ),
    _hopper(
        (193, 256),
        banded=True,
        dtype="bf16",
        seq_max=1448,
        config=replace(_AHEAD_256, heads_together=16),
        why=_IN_TURNS
        + "N=1k: 465 TFLOPS, cuDNN 450; 8 heads together 459, latencies of 2 and 4 455; in another run one tile "
        + "444, cuDNN 455",
    ),
    _hopper(
        (193, 256),
        banded=True,
        dtype="bf16",
        seq_max=2896,
        config=replace(_AHEAD_256, heads_together=8),
        why=_IN_TURNS
        + "N=2k: 584 TFLOPS, cuDNN 509; 4 heads together 549, one tile, a pilot in pairs, 563; in another run 579, "
        + "latencies of 2 and 4 567",
    ),
    _hopper(
        (193, 256),
        banded=True,
        dtype="bf16",
        seq_max=5792,
        config=replace(_AHEAD_256, heads_together=4),
        why=_IN_TURNS
        + "N=4k: 654 TFLOPS, cuDNN 536; 2 heads together 603, one tile, a pilot in pairs, 647; in another run 678 for "
        + "672, 8 heads together 663",
    ),
    _hopper(
        (193, 256),
        banded=True,
        dtype="bf16",
        config=_without_latencies(replace(_LAZY_128X64, heads_together=2, pipeline="pairs")),
        why=_NO_REPAIR + "N=8k, 16k: 1.016, 1.030 of a pilot in pairs, 8 heads; a block ahead 1.019, -",
    ),
    _hopper(
        (193, 256),
        banded=True,
        seq_max=1448,
        config=_without_latencies(replace(_LAZY_128X64, heads_together=8)),
        why=_SWEPT + "in bf16, from the first block as fp16 does, N=1k: 403 TFLOPS, cuDNN 457; a block ahead 402",
    ),
    _hopper(
        (193, 256),
        banded=True,
        seq_max=2896,
        config=CutileConfig(tile_m=128, tile_n=128, occupancy=1, num_worker_warps=8, heads_together=8),
        why=_LANDED + "in bf16, from the first block as fp16 does, N=2k: 489 TFLOPS, cuDNN 499; lazy 128x64 462",
    ),
    _hopper(
        (193, 256),
        banded=True,
        config=CutileConfig(tile_m=128, tile_n=128, occupancy=1, num_worker_warps=8, heads_together=4),
        why=_AGAIN + "as fp16 would do it, in bf16, N=8k 634, 16k 654 TFLOPS, cuDNN 544, 557",
    ),
    Rule(
        arches=("sm100", "sm103"),
        head_dim_max=128,
        banded=True,
        config=CutileConfig(tile_m=128, tile_n=64, occupancy=2),
        why=COMPILED + "no spills in its loops; 128x128 spills once there at D=128, 256x128 252 times",
    ),
    Rule(
        arches=("sm100", "sm103"),
        head_dim_max=128,
        banded=False,
        seq_min=4096,
        config=CutileConfig(tile_m=256, tile_n=128, occupancy=1),
        why=COMPILED + "no spills; NVIDIA's own cuTile examples take it; k and v are read half as often as at 128x128",
    ),
    Rule(
        arches=("sm100", "sm103"),
        head_dim_max=128,
        banded=False,
        config=CutileConfig(tile_m=128, tile_n=128, occupancy=2),
        why=COMPILED + "no spills in its loops; the other tile of NVIDIA's examples, in twice as many blocks",
    ),
    Rule(
        arches=("sm100", "sm103"),
        head_dim_min=129,
        config=CutileConfig(tile_m=128, tile_n=128, occupancy=1),
        why=COMPILED + "the accumulator of one tile fills half of tensor memory",
    ),
    Rule(
        arches=("sm86", "sm89"),
        head_dim_min=65,
        head_dim_max=128,
        config=CutileConfig(tile_m=64, tile_n=32, occupancy=2, k_latency=4, v_latency=6),
        why=COMPILED
        + "no spills in its loops, at latencies of 2 and 4 up to 12; of 64x64 causal tileiras gives up the pipeline",
    ),
    Rule(
        arches=("sm80", "sm86", "sm89", "sm120", "sm121"),
        head_dim_max=128,
        config=CutileConfig(tile_m=64, tile_n=64, occupancy=2),
        why=COMPILED + "NVIDIA's own cuTile examples take 64x64 at occupancy 2 on sm120",
    ),
    Rule(
        arches=("sm86", "sm89"),
        head_dim_min=129,
        banded=True,
        config=CutileConfig(tile_m=64, tile_n=32, occupancy=1, num_worker_warps=8),
        why=COMPILED + "no spills; with 4 warps 205 in its loops, 64x16 39",
    ),
    Rule(
        arches=("sm120", "sm121"),
        head_dim_min=129,
        banded=True,
        config=CutileConfig(tile_m=128, tile_n=16, occupancy=1, num_worker_warps=8),
        why=COMPILED + "no spills in its loops; 64x32 108, with 8 warps 26",
    ),
    Rule(
        arches=("sm80", "sm86", "sm89", "sm120", "sm121"),
        head_dim_min=129,
        config=CutileConfig(tile_m=64, tile_n=32, occupancy=1),
        why=COMPILED + "what fits 99 KiB; 8 warps spill more in its loops, and so do 64x16 and 128x16",
    ),
)


_NO_HINTS = CutileConfig(
    tile_m=128, tile_n=128, occupancy=None, num_worker_warps=8, k_latency=None, v_latency=None
)  # fmt: skip


def _causal_128(config: CutileConfig, evidence: str) -> tuple[Rule[CutileConfig], ...]:
    """What was swept for a rung below full: D=128 with the mask, the cell that the ladder is climbed on."""
    why = _H200 + evidence
    return (Rule(arches=("sm90",), head_dim_min=65, head_dim_max=128, banded=True, config=config, why=why),)


OWN_RULES: Mapping[str, tuple[Rule[CutileConfig], ...]] = {
    "full": FULL_RULES,
    "memory": _causal_128(
        CutileConfig(tile_m=128, tile_n=64, occupancy=None, num_worker_warps=8),
        "483 TFLOPS; 128x128 479; 64x128, which without a hint takes too many registers for two blocks an SM, 386",
    ),
    "math": _causal_128(_NO_HINTS, "481 TFLOPS; 128x64 472; 64x128 with 4 warps 360"),
    "basic": _causal_128(_NO_HINTS, "384 TFLOPS; 128x64 349; 64x128 with 4 warps 312"),
}
"""Rules made for a rung, by its name. Where it has none, it goes by those of the rung that it leads to."""


def rules_of(name: str) -> tuple[Rule[CutileConfig], ...]:
    """The rules of a rung, by its name."""
    own = OWN_RULES.get(name, ())
    if name == "full":
        return own
    return inherit(own, FULL_RULES, top="full", limit=STEPS[name].step.limit)
