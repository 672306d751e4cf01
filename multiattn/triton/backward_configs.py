"""Tiles of the backward kernels per arch: the rules, what fits, and what a tuning sweep should try."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from multiattn.plan.arch import Arch
from multiattn.plan.backend import Variant
from multiattn.plan.config import COMPILED, Config, Rule
from multiattn.plan.support import Reason
from multiattn.problem import Problem
from multiattn.triton.configs import (
    ASYNCHRONOUS,
    BLACKWELL,
    ELEMENT_BYTES,
    HOPPER,
    LARGE,
    SMALL,
    TritonConfig,
    head_pad,
    smem_bytes,
    too_many_programs,
    too_much_smem,
    wrong_fields,
)

SUM_BYTES = 4  # fp32
ROWS_BESIDE = 64
"""Rows of a program of the small kernels before and after the one pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardConfig(TritonConfig):
    """Tiles of the pass over the queries, and with two passes also those of the pass over the keys: dq_*."""

    dq_tile_m: int | None = None
    dq_tile_n: int | None = None
    dq_num_warps: int | None = None
    dq_num_stages: int | None = None

    @property
    def of_dq(self) -> TritonConfig:
        """Tiles of the pass over the keys; ValueError without one."""
        tile_m, tile_n, num_warps, num_stages = self.dq_fields
        if tile_m is None or tile_n is None or num_warps is None or num_stages is None:
            raise ValueError(f"config: got {self}; allowed one with all of dq_tile_m, dq_tile_n, dq_num_*")
        return TritonConfig(
            tile_m=tile_m,
            tile_n=tile_n,
            num_warps=num_warps,
            num_stages=num_stages,
            heads_together=self.heads_together,
        )

    @property
    def dq_fields(self) -> tuple[int | None, int | None, int | None, int | None]:
        """What the pass over the keys needs; all None without one."""
        return self.dq_tile_m, self.dq_tile_n, self.dq_num_warps, self.dq_num_stages


def key_programs(problem: Problem, config: BackwardConfig) -> int:
    """Programs of the pass over the queries: one per tile of keys, key/value head and batch entry."""
    return -(-problem.seq_kv // config.tile_n) * problem.batch * problem.heads_kv


def query_programs(problem: Problem, rows: int) -> int:
    """Programs of a kernel that gives one tile of `rows` queries to each."""
    return -(-problem.seq_q // rows) * problem.batch * problem.heads_q


def workspace_one_pass(problem: Problem, config: Config | None) -> int:
    """Bytes of delta and of the sum of dq, both fp32."""
    return problem.batch * problem.heads_q * problem.seq_q * (problem.head_dim + 1) * SUM_BYTES


def workspace_two_pass(problem: Problem, config: Config | None) -> int:
    """Bytes of delta, in fp32."""
    return problem.batch * problem.heads_q * problem.seq_q * SUM_BYTES


def smem_bytes_of_keys(problem: Problem, arch: Arch, config: BackwardConfig) -> int:
    """Shared memory that the pass over the queries takes at least: the blocks of q and dout in flight.

    Where the tensor cores read it in the background, also the tiles of k and v.
    """
    rows = 2 * config.tile_m * max(1, config.num_stages - 1)
    if arch.name in ASYNCHRONOUS:
        rows = 2 * config.tile_n + 2 * config.tile_m * config.num_stages
    return rows * head_pad(problem.head_dim) * ELEMENT_BYTES


def why_not_fit_one_pass(problem: Problem, arch: Arch, config: Config) -> tuple[Reason, ...]:
    """Every reason why `config` cannot run `problem` on `arch` in one pass."""
    if not isinstance(config, BackwardConfig):
        return (Reason(code="config", got=type(config).__name__, allowed="BackwardConfig"),)
    reasons = _why_not_fit(problem, arch, config)
    if config.dq_fields != (None,) * 4:
        reasons.append(Reason(code="config", got=str(config), allowed="no dq_*: there is no pass over the keys"))
    reasons += too_many_programs(query_programs(problem, ROWS_BESIDE))
    return tuple(reasons)


def why_not_fit_two_pass(problem: Problem, arch: Arch, config: Config) -> tuple[Reason, ...]:
    """Every reason why `config` cannot run `problem` on `arch` in two passes."""
    if not isinstance(config, BackwardConfig):
        return (Reason(code="config", got=type(config).__name__, allowed="BackwardConfig"),)
    reasons = _why_not_fit(problem, arch, config)
    if None in config.dq_fields:
        reasons.append(Reason(code="config", got=str(config), allowed="one with all of dq_*, for the pass over keys"))
        return tuple(reasons)
    of_dq = config.of_dq
    reasons += wrong_fields(of_dq)
    if of_dq.tile_m > 0:
        reasons += too_many_programs(query_programs(problem, of_dq.tile_m))
    needed = smem_bytes(problem, arch, of_dq)
    if arch.name in ASYNCHRONOUS:
        needed += of_dq.tile_m * head_pad(problem.head_dim) * ELEMENT_BYTES  # dout, beside q
    reasons += too_much_smem(problem, arch, of_dq, needed)
    return tuple(reasons)


def _why_not_fit(problem: Problem, arch: Arch, config: BackwardConfig) -> list[Reason]:
    reasons = [*wrong_fields(config)]
    reasons += too_much_smem(problem, arch, config, smem_bytes_of_keys(problem, arch, config))
    if config.tile_n > 0:
        reasons += too_many_programs(key_programs(problem, config))
    return reasons


def candidates(variant: Variant, problem: Problem, arch: Arch) -> Sequence[BackwardConfig]:
    """Configs worth timing for a problem on an arch; what cannot fit is left out."""
    if not arch.is_gpu:
        return ()
    one_pass = bool(dict(variant.flags)["one_pass"])
    found = _one_pass_candidates(problem) if one_pass else _two_pass_candidates(problem)
    return tuple(config for config in dict.fromkeys(found) if not variant.fits(problem, arch, config))


_SHAPES = {
    64: ((64, 128, 8), (128, 128, 8), (64, 64, 4), (128, 64, 4), (64, 128, 4), (128, 64, 8)),
    128: ((64, 128, 8), (64, 64, 4), (32, 128, 8), (64, 64, 8), (128, 64, 8), (32, 64, 4)),
    256: ((64, 64, 8), (32, 64, 8), (32, 128, 8), (64, 128, 8), (16, 64, 4), (16, 128, 8)),
}
"""(tile_m, tile_n, num_warps) of the pass over the queries, by the padded head_dim up to which they are worth a try."""
_DQ_SHAPES = {
    64: ((128, 64, 4), (128, 64, 8), (128, 128, 8), (64, 64, 4)),
    128: ((64, 64, 4), (128, 64, 8), (128, 128, 8), (64, 32, 4)),
    256: ((64, 64, 8), (128, 64, 8), (64, 32, 4), (128, 32, 8)),
}
"""The same of the pass over the keys."""


def _shapes(
    table: Mapping[int, tuple[tuple[int, int, int], ...]], problem: Problem
) -> tuple[tuple[int, int, int], ...]:
    return next(shapes for limit, shapes in table.items() if head_pad(problem.head_dim) <= limit)


def _one_pass_candidates(problem: Problem) -> list[BackwardConfig]:
    together = 8 if problem.is_banded else 1
    return [
        BackwardConfig(tile_m=tile_m, tile_n=tile_n, num_warps=warps, num_stages=stages, heads_together=together)
        for (tile_m, tile_n, warps), stages in itertools.product(_shapes(_SHAPES, problem), (1, 2, 3))
    ]


def _two_pass_candidates(problem: Problem) -> list[BackwardConfig]:
    """Each pass with a middling config of the other, as their times add up."""
    together = 8 if problem.is_banded else 1
    shapes, dq_shapes = _shapes(_SHAPES, problem), _shapes(_DQ_SHAPES, problem)
    both = [(shape, stages, dq_shapes[0], 2) for shape, stages in itertools.product(shapes, (1, 2))]
    both += [(shapes[0], 2, shape, stages) for shape, stages in itertools.product(dq_shapes, (1, 2, 3))]
    return [
        BackwardConfig(
            tile_m=tile_m,
            tile_n=tile_n,
            num_warps=warps,
            num_stages=stages,
            heads_together=together,
            dq_tile_m=dq_tile_m,
            dq_tile_n=dq_tile_n,
            dq_num_warps=dq_warps,
            dq_num_stages=dq_stages,
        )
        for (tile_m, tile_n, warps), stages, (dq_tile_m, dq_tile_n, dq_warps), dq_stages in both
    ]


def _rules(
    arches: tuple[str, ...],
    head_dims: tuple[int, int],
    why: str,
    keys: tuple[int, int, int, int],
    dq: tuple[int, int, int, int] | None = None,
    *,
    masks: tuple[bool, ...] = (False, True),
) -> tuple[Rule[BackwardConfig], ...]:
    """A rule for full and one for causal attention, or one of the two, of (tile_m, tile_n, warps, stages) per pass."""
    tile_m, tile_n, warps, stages = keys
    dq_tile_m, dq_tile_n, dq_warps, dq_stages = dq or (None,) * 4
    return tuple(
        Rule(
            arches=arches,
            config=BackwardConfig(
                tile_m=tile_m,
                tile_n=tile_n,
                num_warps=warps,
                num_stages=stages,
                heads_together=8 if banded else 1,
                dq_tile_m=dq_tile_m,
                dq_tile_n=dq_tile_n,
                dq_num_warps=dq_warps,
                dq_num_stages=dq_stages,
            ),
            why=why,
            head_dim_min=head_dims[0],
            head_dim_max=head_dims[1],
            banded=banded,
        )
        for banded in masks
    )


_FULL, _CAUSAL = (False,), (True,)
_H200 = "H200, 2026-11-21, Triton 3.6.0, B4 N=4096 H*D=2048 bf16, of the candidates: "
_INTERPRETED = "interpreted: time goes by the number of operations, so few and large tiles"
_MMA_SYNC = (*LARGE, *SMALL)

# Below: what descriptors and pointers share, then the rules of each of the four variants.
_ONE_PASS: tuple[Rule[BackwardConfig], ...] = (
    *_rules(("cpu",), (1, 256), _INTERPRETED, (64, 64, 4, 1)),
    *_rules(HOPPER, (1, 64), _H200 + "287 TFLOPS full, 272 causal; 64x128 with 8 warps 255 and 233", (64, 64, 4, 2)),
    *_rules(
        HOPPER, (65, 128),
        _H200 + "271 TFLOPS full, 255 causal, the best that spills nothing; 64x128 reaches 306 and 294 with spills",
        (32, 128, 8, 3),
    ),
    *_rules(HOPPER, (129, 256), COMPILED + "two passes were measured, and come first", (64, 64, 8, 1)),
    *_rules(BLACKWELL, (1, 128), COMPILED + "no other tile promises more", (64, 64, 8, 2)),
    *_rules(BLACKWELL, (129, 256), COMPILED + "the accumulators take half of the tensor memory", (32, 64, 8, 1)),
    *_rules(_MMA_SYNC, (129, 256), COMPILED + "99 KiB of shared memory a block", (32, 32, 4, 1)),
)  # fmt: skip
_TWO_PASS: tuple[Rule[BackwardConfig], ...] = (
    *_rules(("cpu",), (1, 256), _INTERPRETED, (64, 64, 4, 1), (64, 64, 4, 1)),
    *_rules(
        HOPPER, (129, 256), _H200 + "243 TFLOPS full, 233 causal; 32x64 199 and 203",
        (64, 64, 8, 2), (128, 32, 8, 3),
    ),
    *_rules(BLACKWELL, (1, 128), COMPILED + "no other tile promises more", (64, 64, 8, 2), (128, 64, 8, 2)),
    *_rules(
        BLACKWELL, (129, 256), COMPILED + "the accumulators take half of the tensor memory",
        (32, 64, 8, 1), (64, 32, 8, 1),
    ),
    *_rules(_MMA_SYNC, (129, 256), COMPILED + "99 KiB of shared memory a block", (32, 32, 4, 1), (32, 32, 4, 1)),
)  # fmt: skip

_SMALL_KEYS = (64, 32, 4, 2)
_SHARED = COMPILED + "8 warps share the accumulators and spill at most 4 times, outside the loops"

DESCRIPTOR_ONE_PASS_RULES: tuple[Rule[BackwardConfig], ...] = (
    *_ONE_PASS,
    *_rules(SMALL, (1, 64), COMPILED + "64x64 spills, with 4 warps and with 8", _SMALL_KEYS),
    *_rules(SMALL, (65, 128), _SHARED + "; 64 queries are more than 99 KiB", (32, 64, 8, 2)),
)
DESCRIPTOR_TWO_PASS_RULES: tuple[Rule[BackwardConfig], ...] = (
    *_rules(
        HOPPER, (1, 64), _H200 + "400 TFLOPS; 64x64 275, one pass 287. 3.6 spills 8 bytes before the loops, 3.9 none",
        (128, 64, 4, 2), (128, 64, 4, 3), masks=_FULL,
    ),
    *_rules(
        HOPPER, (1, 64), _H200 + "335 TFLOPS; 64x64 257, one pass 272. 3.6 spills 8 bytes before the loops, 3.9 none",
        (128, 64, 4, 2), (128, 64, 4, 2), masks=_CAUSAL,
    ),
    *_rules(
        HOPPER, (65, 128), _H200 + "373 TFLOPS full, 354 causal; 64x128 with 8 warps 304 causal, one pass 306 and 294",
        (64, 64, 4, 2), (128, 64, 8, 3),
    ),
    *_TWO_PASS,
    *_rules(SMALL, (1, 64), COMPILED + "64x64 spills, with 4 warps and with 8", _SMALL_KEYS, (64, 32, 4, 2)),
    *_rules(SMALL, (65, 128), _SHARED, (64, 64, 8, 2), (64, 32, 4, 2)),
)  # fmt: skip
"""On sm90 two passes beat one at D=64 and 128 (373 to 306 TFLOPS full, 354 to 294 causal at D=128), though they do 7
GEMMs to its 5: no fp32 sums go through memory, and a block of four warps, of which two share an SM, holds its
accumulators."""

POINTER_ONE_PASS_RULES: tuple[Rule[BackwardConfig], ...] = (
    *_ONE_PASS,
    *_rules(SMALL, (1, 64), COMPILED + "64x64 spills on sm120", (32, 64, 4, 2)),
    *_rules(_MMA_SYNC, (1, 128), _SHARED, (64, 64, 8, 2)),
)
POINTER_TWO_PASS_RULES: tuple[Rule[BackwardConfig], ...] = (
    *_rules(
        HOPPER, (1, 128), COMPILED + "at 64x64 with 4 warps pointers spill 112 bytes",
        (32, 64, 8, 2), (128, 64, 8, 3),
    ),
    *_TWO_PASS,
    *_rules(_MMA_SYNC, (1, 128), _SHARED, (64, 64, 8, 2), (64, 32, 4, 2)),
)  # fmt: skip
"""Pointers take registers on sm90 that the tiles of descriptors have no room for."""
