"""Tiles of the forward kernel per arch: the rules, what fits, and what a tuning sweep should try."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from multiattn.plan.arch import Arch
from multiattn.plan.backend import Variant
from multiattn.plan.columns import one_width
from multiattn.plan.config import COMPILED, Config, Rule, inherit
from multiattn.plan.support import Reason
from multiattn.problem import Problem
from multiattn.triton.steps import STEPS, Step

ELEMENT_BYTES = 2  # fp16 and bf16
GRID_MAX = 2**31 - 1
"""Most programs of a launch: CUDA's limit in x."""

HOPPER = ("sm90",)  # wgmma
BLACKWELL = ("sm100", "sm103")  # tcgen05
LARGE = ("sm80",)  # mma.sync, 163 KiB of shared memory a block
SMALL = ("sm86", "sm89", "sm120", "sm121")  # mma.sync, 99 KiB
ASYNCHRONOUS = (*HOPPER, *BLACKWELL)
"""Arches whose tensor cores read shared memory in the background."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonConfig(Config):
    """Tiles and what Triton's compiler is told."""

    num_warps: int
    num_stages: int
    """Blocks of keys in flight; 1 switches the pipeline off."""
    heads_together: int = 1
    """Heads whose tiles alternate in launch order: 1 walks one head after the other, more suits causal."""
    registers: int | None = None
    """Most registers per thread; None leaves it to the compiler."""


def head_pad(head_dim: int) -> int:
    """head_dim as the kernel computes it: Triton's tiles are powers of two, and tl.dot wants at least 16."""
    return one_width(head_dim)


def grid_programs(problem: Problem, config: TritonConfig) -> int:
    """Programs of a launch: one per tile of queries, head and batch entry."""
    return -(-problem.seq_q // config.tile_m) * problem.batch * problem.heads_q


def smem_bytes(problem: Problem, arch: Arch, config: TritonConfig) -> int:
    """Shared memory that the tiles of q, k and v take; the compiler adds barriers and scratch of a few KiB.

    One more block of keys is held where the tensor cores read it in the background.
    """
    if config.num_stages == 1:
        blocks = 1  # nothing is in flight: V takes the place of K
    else:
        blocks = 2 * (config.num_stages if arch.name in ASYNCHRONOUS else config.num_stages - 1)
    rows = config.tile_m + config.tile_n * blocks
    return rows * head_pad(problem.head_dim) * ELEMENT_BYTES


def why_not_fit(problem: Problem, arch: Arch, config: Config, *, step: Step | None = None) -> tuple[Reason, ...]:
    """Every reason why `config` cannot run `problem` on `arch`; with a step also what it does not do."""
    if not isinstance(config, TritonConfig):
        return (Reason(code="config", got=type(config).__name__, allowed="TritonConfig"),)
    reasons = [*wrong_fields(config), *too_much_smem(problem, arch, config, smem_bytes(problem, arch, config))]
    if step is not None:
        reasons += beyond_step(step, config)
    if config.tile_m > 0:
        reasons += too_many_programs(grid_programs(problem, config))
    return tuple(reasons)


def wrong_fields(config: TritonConfig) -> list[Reason]:
    """A reason for every field of a config that no kernel accepts."""
    wrong: list[tuple[str, str]] = []
    wrong += [
        (name, "powers of two") for name in ("tile_m", "tile_n", "num_warps") if not _is_power_of_two(config, name)
    ]
    wrong += [(name, "16 to 256") for name in ("tile_m", "tile_n") if getattr(config, name) not in range(16, 257)]
    wrong += [(name, "at least 1") for name in ("num_stages", "heads_together") if getattr(config, name) < 1]
    return [Reason(code="config", got=f"{name}={getattr(config, name)}", allowed=allowed) for name, allowed in wrong]


def beyond_step(step: Step, config: TritonConfig) -> list[Reason]:
    """A reason for every field of a config that asks for what a step does not do: what is planned is what runs."""
    limited = step.limit(config)
    return [
        Reason(code="config", got=f"{name}={asked}", allowed=f"{name}={done} in this variant")
        for name in (field.name for field in fields(config))
        if (asked := getattr(config, name)) != (done := getattr(limited, name))
    ]


def too_much_smem(problem: Problem, arch: Arch, config: TritonConfig, needed: int) -> list[Reason]:
    """A reason if a block of `arch` cannot have the bytes of shared memory that are needed."""
    if not arch.is_gpu or needed <= arch.smem_per_block:
        return []
    got = f"{config} with D={problem.head_dim}: {needed} bytes of shared memory or more"
    allowed = f"{arch.smem_per_block} bytes on {arch.name}"
    return [Reason(code="config", got=got, allowed=allowed, hint="take smaller tiles or fewer stages")]


def too_many_programs(programs: int) -> list[Reason]:
    """A reason if a launch would be larger than a grid can be."""
    if programs <= GRID_MAX:
        return []
    return [Reason(code="config", got=f"{programs} programs", allowed=f"a grid of up to {GRID_MAX}")]


def _is_power_of_two(config: TritonConfig, name: str) -> bool:
    value: int = getattr(config, name)
    return value > 0 and value & (value - 1) == 0


def candidates(variant: Variant, problem: Problem, arch: Arch) -> Sequence[TritonConfig]:
    """Configs worth timing for a problem on an arch; what cannot fit is left out."""
    if not arch.is_gpu:
        return ()
    pad = head_pad(problem.head_dim)
    shapes: list[tuple[int, int, int, int | None]] = [
        (64, 32, 4, None),
        (64, 64, 4, None),
        (64, 128, 4, None),
        (128, 64, 8, None),
        (128, 128, 8, None),
    ]
    if pad <= 128:
        shapes += [(128, 64, 4, None)]
    if pad <= 64:
        shapes += [(64, 64, 4, 128)]  # 128 registers: four blocks of four warps share an SM
    step = STEPS[variant.name].step
    configs = [
        TritonConfig(
            tile_m=tile_m,
            tile_n=tile_n,
            num_warps=num_warps,
            num_stages=num_stages,
            registers=registers,
            heads_together=8 if problem.is_banded else 1,
        )
        for (tile_m, tile_n, num_warps, registers), num_stages in itertools.product(shapes, (1, 2, 3))
    ]
    limited = dict.fromkeys(map(step.limit, configs))
    return tuple(config for config in limited if not why_not_fit(problem, arch, config))


def _rules(
    arches: tuple[str, ...],
    head_dims: tuple[int, int],
    why: str,
    *,
    tile_m: int,
    tile_n: int,
    num_warps: int,
    num_stages: int,
    registers: int | None = None,
    masks: tuple[bool, ...] = (False, True),
) -> tuple[Rule[TritonConfig], ...]:
    """A rule for full and one for causal attention, which differ in the launch order only; or one of the two."""
    return tuple(
        Rule(
            arches=arches,
            config=TritonConfig(
                tile_m=tile_m,
                tile_n=tile_n,
                num_warps=num_warps,
                num_stages=num_stages,
                registers=registers,
                heads_together=8 if banded else 1,
            ),
            why=why,
            head_dim_min=head_dims[0],
            head_dim_max=head_dims[1],
            banded=banded,
        )
        for banded in masks
    )


_FULL = (False,)
_CAUSAL = (True,)
_H200 = "H200, 2026-11-21, Triton 3.6.0, B4 N=4096 H*D=2048 bf16, best of the candidates: "

_WITHIN_A_WARP = COMPILED + "from tile_m = D on a row of scores stays in a warp, without shared memory: "

_ANY_ACCESS: tuple[Rule[TritonConfig], ...] = (
    Rule(
        arches=("cpu",),
        config=TritonConfig(tile_m=64, tile_n=64, num_warps=4, num_stages=1, heads_together=2),
        why="interpreted, 2 cores, 2026-11: time goes by the number of operations, so few and large tiles",
    ),
    *_rules(
        BLACKWELL, (65, 128), COMPILED + "one 128-row tile of tensor memory; compiled: 4 warps spill in the loop",
        tile_m=128, tile_n=64, num_warps=8, num_stages=3,
    ),
    *_rules(
        BLACKWELL, (129, 256), COMPILED + "8 warps share the accumulator",
        tile_m=128, tile_n=64, num_warps=8, num_stages=2,
    ),
    *_rules(
        SMALL, (1, 64), COMPILED + "no other tile promises more",
        tile_m=64, tile_n=64, num_warps=4, num_stages=2,
    ),
    *_rules(
        SMALL, (65, 128), _WITHIN_A_WARP + "5 instructions an mma.sync, at 64x32 7 to 8; 128x64 takes one stage",
        tile_m=128, tile_n=32, num_warps=8, num_stages=3,
    ),
    *_rules(
        (*LARGE, *SMALL), (129, 256), COMPILED + "what fits 99 KiB; on sm80 128x32 spills four times as often",
        tile_m=64, tile_n=32, num_warps=4, num_stages=2,
    ),
)  # fmt: skip
"""For a descriptor and for pointers alike."""

DESCRIPTOR_RULES: tuple[Rule[TritonConfig], ...] = (
    *_rules(
        HOPPER, (1, 64), _H200 + "469 TFLOPS; 64x64 with 3 stages 435",
        tile_m=64, tile_n=128, num_warps=4, num_stages=2, masks=_FULL,
    ),
    *_rules(
        HOPPER, (1, 64), _H200 + "409 TFLOPS; 64x128 with 3 stages 406. What spills at 128 registers is the redo",
        tile_m=64, tile_n=64, num_warps=4, num_stages=3, registers=128, masks=_CAUSAL,
    ),
    *_rules(
        HOPPER, (65, 128), _H200 + "565 TFLOPS; 128x64 with 2 stages 528. Blocks on one SM hide each other's loads",
        tile_m=64, tile_n=128, num_warps=4, num_stages=1, masks=_FULL,
    ),
    *_rules(
        HOPPER, (65, 128), _H200 + "503 TFLOPS; 128x64 with 2 stages 471, 64x128 with 1 stage 436",
        tile_m=64, tile_n=64, num_warps=4, num_stages=3, masks=_CAUSAL,
    ),
    *_rules(
        HOPPER, (129, 256), _H200 + "653 TFLOPS full, 529 causal; 128x64, 8 warps, 2 stages 520 and 496",
        tile_m=64, tile_n=128, num_warps=4, num_stages=1,
    ),
    *_rules(
        BLACKWELL, (1, 64), COMPILED + "one 128-row tile of tensor memory",
        tile_m=128, tile_n=64, num_warps=4, num_stages=3,
    ),
    *_ANY_ACCESS,
)  # fmt: skip

POINTER_RULES: tuple[Rule[TritonConfig], ...] = (
    *_rules(
        HOPPER, (1, 128), COMPILED + "at 64x128 pointers spill 56 bytes",
        tile_m=64, tile_n=64, num_warps=4, num_stages=2,
    ),
    *_rules(
        HOPPER, (129, 256), COMPILED + "8 warps share the accumulator and hardly spill",
        tile_m=128, tile_n=64, num_warps=8, num_stages=2,
    ),
    *_rules(
        BLACKWELL, (1, 64), COMPILED + "4 warps, which descriptors leave registers for, spill",
        tile_m=128, tile_n=64, num_warps=8, num_stages=3,
    ),
    *_rules(
        LARGE, (1, 64), COMPILED + "FlashAttention-2's rows; compiled: 128x64 spills",
        tile_m=128, tile_n=32, num_warps=4, num_stages=3,
    ),
    *_rules(
        LARGE, (65, 128), _WITHIN_A_WARP + "3.2 to 3.5 instructions an mma.sync, at 64x32 7.6; 4 warps spill",
        tile_m=128, tile_n=64, num_warps=8, num_stages=2,
    ),
    *_ANY_ACCESS,
)  # fmt: skip
"""On sm90 the addresses that pointers need leave no registers for the tile of a descriptor."""

_NO_LOADS_AHEAD = TritonConfig(tile_m=64, tile_n=128, num_warps=4, num_stages=1)

OWN_RULES: Mapping[str, tuple[Rule[TritonConfig], ...]] = {
    "full": DESCRIPTOR_RULES,
    "pointer_full": POINTER_RULES,
    "math": (
        Rule(
            arches=HOPPER, head_dim_min=65, head_dim_max=128, banded=True, config=_NO_LOADS_AHEAD,
            why=_H200 + "310 TFLOPS; 128x64 299, 64x64 266",
        ),
    ),
    "basic": (
        Rule(
            arches=HOPPER, head_dim_min=65, head_dim_max=128, banded=True, config=_NO_LOADS_AHEAD,
            why=_H200 + "239 TFLOPS; 128x128 with 8 warps 223, 64x64 207",
        ),
    ),
}  # fmt: skip
"""Rules made for a rung, by its name. Where it has none, it goes by those of the rung that it leads to."""


def rules_of(name: str) -> tuple[Rule[TritonConfig], ...]:
    """The rules of a rung, by its name."""
    step = STEPS[name].step
    top = "full" if step.descriptor else "pointer_full"
    own = OWN_RULES.get(name, ())
    if name == top:
        return own
    return inherit(own, OWN_RULES[top], top=top, limit=step.limit)
