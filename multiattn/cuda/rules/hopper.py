"""The configs that Hopper's forward kernel takes; every rule with its evidence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from multiattn.cuda.backward_wgmma import WgmmaBackwardConfig
from multiattn.cuda.backward_wgmma_two_pass import WgmmaTwoPassConfig
from multiattn.cuda.forward_wgmma import WgmmaConfig
from multiattn.plan.arch import ARCHS
from multiattn.plan.config import COMPILED, C, Rule
from multiattn.plan.schedule import most_multiprocessors
from multiattn.plan.tuned import tuned_rules

_EMULATED = Rule(
    arches=("cpu",),
    config=WgmmaConfig(tile_m=128, tile_n=32),
    why="emulated: two warpgroups, four stages and small tiles of keys; split_q builds and runs faster",
    only_named=True,
)

_192X64 = WgmmaConfig(tile_m=192, tile_n=64, stages=8, q_slots=2, pingpong=True)
_128X64 = WgmmaConfig(tile_m=128, tile_n=64, stages=5, q_slots=1, pingpong=True, tma_store=False)


def _scored(
    head_dims: tuple[int, int], config: WgmmaConfig, why: str, *, reads_keys: bool | None = None
) -> Rule[WgmmaConfig]:
    least, most = head_dims
    return Rule(
        arches=("sm90",),
        head_dim_min=least,
        head_dim_max=most,
        config=config,
        scored=True,
        reads_keys=reads_keys,
        why=f"{COMPILED}{why}",
    )


_SPILLS = "a bias has {} hot spills, with the tile for other expressions {}"
_PLAIN = "the tile of plain scores, with exact maxima; ALiBi and softcap have {} hot spills"
SCORED: tuple[Rule[WgmmaConfig], ...] = (
    _scored((1, 64), replace(_192X64, stages=16, q_slots=3), _SPILLS.format("no", "up to 190"), reads_keys=True),
    _scored((65, 96), _192X64, _SPILLS.format("no", "up to 108"), reads_keys=True),
    _scored((97, 128), replace(_192X64, tile_n=48, stages=10), _SPILLS.format("no", "up to 50"), reads_keys=True),
    _scored((129, 160), replace(_128X64, q_slots=2, tma_store=True), _SPILLS.format("no", "up to 56"), reads_keys=True),
    _scored((1, 64), replace(_192X64, tile_n=128, stages=9, q_slots=3), _PLAIN.format("no")),
    _scored((65, 96), replace(_192X64, tile_n=96, stages=5, q_in_registers=True), _PLAIN.format("no")),
    _scored((97, 128), replace(_192X64, q_in_registers=True), _PLAIN.format("no")),
    _scored((129, 160), replace(_192X64, stages=6, q_slots=1), _PLAIN.format("up to 2")),
    _scored((161, 192), replace(_128X64, q_slots=2, tma_store=True), _PLAIN.format("no")),
    _scored((193, 256), _128X64, _PLAIN.format("up to 2")),
)
"""An expression wants registers, of which three warpgroups have few, and maxima that are exact."""

WGMMA_RULES: tuple[Rule[WgmmaConfig], ...] = (*SCORED, *tuned_rules("cuda", "wgmma", WgmmaConfig), _EMULATED)
"""First match wins."""

_PLAIN_BACKWARD = WgmmaBackwardConfig(tile_m=64, tile_n=128, stream_k=most_multiprocessors(ARCHS["sm90"]))
_EARLY = replace(_PLAIN_BACKWARD, k_in_registers=True, early_scores=True, k_stages=2)
_BY_TMA = replace(_PLAIN_BACKWARD, dq_by_tma=True)
_HALVES = replace(_BY_TMA, half_dq=True)
_H100 = "H100 2026-11-26, N=4096, H*D=2048 in bf16, full / causal: "


def _measured(head_dims: tuple[int, int], config: C, why: str, **where: Any) -> Rule[C]:
    least, most = head_dims
    return Rule(arches=("sm90",), head_dim_min=least, head_dim_max=most, config=config, why=_H100 + why, **where)


def _emulated(head_dim_max: int, config: WgmmaBackwardConfig) -> Rule[WgmmaBackwardConfig]:
    config = replace(config, stream_k=_EMULATED_SMS)
    return Rule(arches=("cpu",), head_dim_max=head_dim_max, config=config, why="emulated: as on sm90", only_named=True)


_EMULATED_SMS = 3  # so few that small problems are divided, too
_LONG = (
    "583 / 507 TFLOPS; two buffers of K and of Q 549 / 468; with dQ from registers and three buffers of dO, in another "
    "run, - / 531 beside 530, at N=8192 - / 573 beside 586"
)

WGMMA_BACKWARD_RULES: tuple[Rule[WgmmaBackwardConfig], ...] = (
    _measured(
        (1, 64),
        replace(_EARLY, q_stages=4, dout_stages=3),
        "- / 480 TFLOPS; at N=16384 540, where with fewer buffers of Q and dO 530",
        banded=True,
    ),
    _measured(
        (1, 64),
        _EARLY,
        "549 / 479 TFLOPS; scores not early, K and V in registers 508 / 470; dQ by TMA 500; more buffers 535 / 480",
    ),
    _measured((65, 96), _BY_TMA, "at D=96, N=2048 525 / 407 TFLOPS; dQ from registers 508 / 405, in halves 485 / 397"),
    _measured((97, 128), _HALVES, _LONG, seq_min=513),
    _measured(
        (97, 128),
        _HALVES,
        "two passes are faster where the kernels around this one weigh most: at N=512 339 / 225 TFLOPS, this one "
        "313 / 184; on an H200 372 / 250, this one 375 / 230, at N=1024 440 / 352, this one 489 / 363",
        only_named=True,
    ),
    _emulated(64, _EARLY),
    _emulated(96, _BY_TMA),
    _emulated(128, _HALVES),
)
"""First match wins."""

_TWO_PASS = WgmmaTwoPassConfig(tile_m=64, tile_n=64)
_TWO_PASS_KEPT = replace(_TWO_PASS, q_stages=3, dout_stages=3, k_stages=3, v_stages=2, kv_in_registers=True)


def _two_pass(head_dims: tuple[int, int], config: WgmmaTwoPassConfig, why: str) -> Rule[WgmmaTwoPassConfig]:
    return _measured(head_dims, config, why, scored=False)


def _two_pass_scored(
    head_dims: tuple[int, int], config: WgmmaTwoPassConfig, why: str, *, reads_keys: bool | None = None
) -> Rule[WgmmaTwoPassConfig]:
    seen = COMPILED if reads_keys else _H200_SCORED
    return replace(_measured(head_dims, config, why, scored=True, reads_keys=reads_keys), why=seen + why)


_H200_SCORED = "H200 2026-11-26, N=4096, H*D=2048 in bf16, causal, softcap / ALiBi: "
TWO_PASS_SCORED: tuple[Rule[WgmmaTwoPassConfig], ...] = (
    _two_pass_scored(
        (161, 192),
        replace(_TWO_PASS_KEPT, kv_in_registers=False),
        "a bias has no hot spills, with K and V in registers up to 17",
        reads_keys=True,
    ),
    _two_pass_scored(
        (225, 256),
        replace(_TWO_PASS, dp_late=True),
        "a bias spills one word in a loop, up to 2 instructions, with dP beside weights up to 22",
        reads_keys=True,
    ),
    _two_pass_scored(
        (1, 192),
        _TWO_PASS_KEPT,
        "at D=64 242 / 275 TFLOPS, the kernel for sm80 216 / 218, at D=128 365 / 390, that one 271 / 273",
    ),
    _two_pass_scored((193, 256), _TWO_PASS, "at D=256 441 / 464 TFLOPS, the kernel for sm80 236 / 231"),
)
"""As plain scores have them, but where an element for each key wants more registers than there are."""

WGMMA_TWO_PASS_RULES: tuple[Rule[WgmmaTwoPassConfig], ...] = (
    _two_pass(
        (1, 160),
        _TWO_PASS_KEPT,
        "at D=160 490 / 429 TFLOPS, D=128 465 / 458, D=64 322 / 317; K and V from shared memory 487 / - at D=160",
    ),
    _two_pass(
        (161, 192), _TWO_PASS_KEPT, "521 / 488 TFLOPS; K and V from shared memory 498 / 480; scores ahead 525 / 484"
    ),
    _two_pass((193, 256), _TWO_PASS, "487 / 462 TFLOPS; scores ahead of gradients 412 / 419, of dq alone 437 / 427"),
    *TWO_PASS_SCORED,
    Rule(arches=("cpu",), head_dim_max=192, config=_TWO_PASS_KEPT, why="emulated: as on sm90", only_named=True),
    Rule(arches=("cpu",), config=_TWO_PASS, why="emulated: as on sm90", only_named=True),
)
"""First match wins."""
