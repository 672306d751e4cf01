"""Which config the Gluon kernel takes, each rule with its evidence."""

from __future__ import annotations

from multiattn.config import Rule
from multiattn.triton.gluon.configs import ARCHES, GluonConfig

_H200 = "H200, 2026-11-23, Triton 3.6.0, 16k tokens H*D=2048 bf16, graph replay: "


def _rule(
    head_dims: tuple[int, int],
    causal: bool | None,
    why: str,
    *,
    tile_m: int,
    tile_n: int,
    stages: int,
    q_slots: int,
    pingpong: bool = False,
    seqs: tuple[int, int | None] = (0, None),
) -> Rule[GluonConfig]:
    config = GluonConfig(tile_m=tile_m, tile_n=tile_n, stages=stages, q_slots=q_slots, pingpong=pingpong, lazy_max=True)
    return Rule(
        arches=ARCHES,
        config=config,
        why=why,
        head_dim_min=head_dims[0],
        head_dim_max=head_dims[1],
        causal=causal,
        seq_min=seqs[0],
        seq_max=seqs[1],
    )


RULES: tuple[Rule[GluonConfig], ...] = (
    _rule(
        (1, 64), True, _H200 + "N=512 280 TFLOPS, N=1k 382; 192x128 with turns 223 and 333",
        tile_m=192, tile_n=64, stages=12, q_slots=2, seqs=(0, 2047),
    ),
    _rule(
        (1, 64), None, _H200 + "N=4k 559 TFLOPS full, 516 causal; without turns 552 and 466, 192x64 538 and 514",
        tile_m=192, tile_n=128, stages=8, q_slots=2, pingpong=True,
    ),
    _rule(
        (65, 96), None, "a guess: as at D=128",
        tile_m=128, tile_n=128, stages=5, q_slots=2,
    ),
    _rule(
        (97, 128), False, _H200 + "N=4k 670 TFLOPS, N=16k 724; 192x64 664 and 713",
        tile_m=128, tile_n=128, stages=4, q_slots=2, seqs=(2048, None),
    ),
    _rule(
        (97, 128), None, _H200 + "N=1k 474 TFLOPS causal, N=4k 652; 128x128 433 and 626",
        tile_m=192, tile_n=64, stages=8, q_slots=2,
    ),
    _rule(
        (129, 192), None, "a guess: as at D=256, with the memory that is left",
        tile_m=128, tile_n=64, stages=5, q_slots=2,
    ),
    _rule(
        (193, 256), None, _H200 + "N=4k 681 TFLOPS full, 642 causal; 128x32 564 and 533",
        tile_m=128, tile_n=64, stages=5, q_slots=1, pingpong=True,
    ),
)  # fmt: skip
"""First match wins."""
