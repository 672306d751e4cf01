"""Configs that no kernel is made for, of every family: each is refused with what came and what is allowed."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from multiattn import Problem
from multiattn.cuda.backward_wgmma_two_pass import TwoPassQueriesConfig
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import BACKENDS, DIRECTIONS, find_variant, get, plan_variant
from multiattn.sequences import Batching

SM90 = ARCHS["sm90"]
SMEM = "232448 bytes a block on sm90"


def problem(variant: str, number: int) -> Problem:
    """A problem for this variant, whose head_dim is the number; for `split_keys_wgmma` that of the keys of a page."""
    sizes = {"batch": 2, "heads_q": 8, "heads_kv": 2, "seq_q": 300, "seq_kv": 500, "head_dim": number}
    if variant == "split_keys":
        sizes["seq_q"] = 1
    if variant == "split_keys_wgmma":
        pages = -(-500 // number)
        cache = Batching.cached(2, 2 * pages, number, pages)
        sizes |= {"seq_q": 16, "seq_kv": pages * number, "head_dim": 128, "batching": cache}
    return Problem.contiguous(**sizes)


# Of each family its fields, then the number of a problem, what differs from them, what came and what is allowed.
# No fields: those of the rule for this head_dim.
ROWS: dict[tuple[str, str, str], tuple[dict[str, Any] | None, tuple[tuple[int, dict[str, Any], str, str], ...]]] = {
    ("triton", "forward", "full"): ({"tile_m": 64, "tile_n": 64, "warps": 4, "stages": 2}, (
        (256, {"tile_m": 128, "tile_n": 128, "warps": 8, "stages": 4}, "bytes of shared memory", SMEM),
    )),
    ("triton", "forward", "split_keys"): ({"tile_m": 16, "tile_n": 64, "warps": 4, "stages": 3}, (
        (128, {"tile_m": 64, "tile_n": 256}, "bytes of shared memory", SMEM),
    )),
    ("triton", "forward", "warp_specialized"): ({"tile_m": 128, "tile_n": 128, "stages": 4, "q_slots": 2}, (
        (128, {"stages": 9}, "bytes", SMEM),
        (128, {"tile_m": 192}, "160 registers for output, scores and weights", ""),
    )),
    ("triton", "backward", "warp_specialized"): (None, (
        (128, {"q_stages": 6}, "bytes", SMEM),
        (128, {"early_scores": True}, "256 registers for gradients, scores and weights", ""),
    )),
    ("triton", "backward", "warp_specialized_two_pass"): (None, (
        (128, {"k_stages": 8}, "bytes", SMEM),
        (200, {"kv_in_registers": True}, "", ""),  # a gradient of D=256 takes 128 registers, K would take 64 more
        (256, {"kv_in_registers": True}, "", ""),
    )),
    ("cuda", "forward", "wgmma"): ({"tile_m": 128, "tile_n": 64}, (
        (64, {"tile_m": 64}, "tile_m=64", "128, 192"),
        (64, {"cluster": 2}, "scheduler=dynamic with cluster=2", "one_tile, static"),
        (64, {"tile_n": 256}, "224 registers", "up to 208 with 2 warpgroups"),
        (64, {"tile_n": 224, "q_in_registers": True}, "q_in_registers with 200 registers for all else", "up to 192"),
        (64, {"tile_m": 192, "tile_n": 160}, "152 registers", "up to 144 with 3 warpgroups"),
        (256, {"tile_n": 48, "stages": 16}, "459264 bytes", SMEM),
    )),
    ("cuda", "backward", "wgmma"): ({"tile_m": 64, "tile_n": 128}, (
        (128, {}, "", "half_dq"),
        (128, {"half_dq": True, "dout_stages": 3, "v_in_registers": True}, "", "up to 176"),
        (96, {"k_in_registers": True, "v_in_registers": True, "k_stages": 2}, "", "up to 152"),
        (96, {"k_in_registers": True, "early_scores": True, "k_stages": 2}, "", "up to 176"),
        (72, {"early_scores": True}, "", "half_dq"),
        (128, {"half_dq": True, "dq_by_tma": True, "k_stages": 2}, "bytes", SMEM),
        (128, {"half_dq": True, "dout_stages": 3, "q_stages": 6}, "bytes", SMEM),
    )),
    ("cuda", "backward", "wgmma_two_pass"): ({"tile_m": 64, "tile_n": 64}, (
        (256, {"kv_in_registers": True}, "", "up to 208"),
        (200, {"kv_in_registers": True}, "", "D up to 192"),
        (192, {"ahead": True, "dq": TwoPassQueriesConfig(ahead=True, dp_late=True)}, "", "one of them"),
        (256, {"q_stages": 3}, "bytes", SMEM),
        (256, {"dq": TwoPassQueriesConfig(v_stages=2)}, "bytes", SMEM),
        (64, {"dq": TwoPassQueriesConfig(k_stages=1)}, "k_stages=1", "2 to 8"),
    )),
    ("cuda", "backward", "atomic"): ({"tile_m": 64, "tile_n": 128, "warps": 8, "stages": 2}, (
        (128, {"tile_m": 40}, "", "tile_m in multiples of 16"),
        (128, {"tile_n": 96}, "", "tile_n in multiples of 16 per pair of warps"),
        (128, {"warps": 6, "tile_n": 48}, "", "2, 4, 8, 16"),
        (128, {"tile_n": 256}, "bytes", SMEM),
    )),
    ("cuda", "backward", "two_pass"): (None, (
        (128, {"dq": None}, "", "a QueryConfig as dq"),
        (128, {"dq.tile_m": 48}, "", "dq: tile_m in multiples of 16 per warp"),
        (128, {"dq.stages": 3}, "stages=3", "1, 2"),
    )),
    ("cuda", "forward", "split_keys_wgmma"): ({"tile_m": 128, "tile_n": 64, "stages": 4, "splits": 1}, (
        (64, {"tile_m": 64, "pingpong": True}, "pingpong with tile_m=64", "128, 192"),
        (192, {"tile_n": 240, "stages": 3}, "244 registers", "up to 208 with 2 warpgroups"),
        (192, {"tile_n": 192, "stages": 3, "q_in_registers": True}, "with 208 registers for all else", "up to 188"),
        (64, {"stages": 16}, "295424 bytes", SMEM),
        (64, {"gathers": True, "tile_m": 192}, "gathers with tile_m=192", "64, 128"),
        (192, {"gathers": True, "tile_n": 144, "stages": 3}, "gathers with tile_n=144", "up to 128"),
        (8, {"tile_n": 256, "stages": 3}, "boxes for 256 keys in pages of 8", ""),
    )),
}  # fmt: skip


def changed(config: Any, changes: dict[str, Any]) -> Any:
    """A config with other fields; `dq.` begins those of one within."""
    for name, value in changes.items():
        outer, _, inner = name.partition(".")
        config = replace(config, **{outer: changed(getattr(config, outer), {inner: value}) if inner else value})
    return config


def assert_refused(whose: tuple[str, str, str], asked: Problem, config: Any, got: str, allowed: str) -> None:
    reasons = find_variant(get(whose[0]), whose[2], whose[1]).fits(asked, SM90, config)
    told = [(it.code, it.got, it.allowed) for it in reasons]
    assert any(code in ("config", "page") and got in came and allowed in may for code, came, may in told), told


@pytest.mark.parametrize(
    ("whose", "number", "changes", "got", "allowed"),
    [(whose, *row) for whose, (_, rows) in ROWS.items() for row in rows],
    ids=lambda it: "-".join(it) if isinstance(it, tuple) else str(it),
)
def test_a_config_that_does_not_fit_is_a_reason(whose, number, changes, got, allowed):
    name, direction, own = whose
    variant, given = find_variant(get(name), own, direction), ROWS[whose][0]
    asked = problem(own, number)
    if given is None:
        config = plan_variant(get(name), variant, asked, SM90, direction=direction).config
    else:
        config = variant.config_type(**given)
    assert_refused(whose, asked, changed(config, changes), got, allowed)


CANDIDATES = (-1, 0, 3, 7, 9, 17, 33, 300, 2000, "random")
"""Values of which each field that is limited refuses one."""


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", BACKENDS)
def test_each_limit_of_a_field_is_told(name, direction):
    """Configs are those that the package's own rules have for Hopper."""
    told = set()
    for variant in get(name).op(direction).offered:
        asked = problem(variant.name, 64)
        config = plan_variant(get(name), variant, asked, SM90, direction=direction).config
        nested = getattr(config, "dq", None)
        limited = ((part, it) for part in (config, nested) if part for it in fields(part) if "limit" in it.metadata)
        for part, field in limited:
            allows, words = field.metadata["limit"]
            of_its_type = (it for it in CANDIDATES if isinstance(it, str) == (field.type == "str"))
            wrong = next(it for it in of_its_type if not allows(it))
            own = replace(part, **{field.name: wrong})
            own = own if part is config else replace(config, dq=own)
            assert_refused((name, direction, variant.name), asked, own, f"{field.name}={wrong}", words)
            told.add(field.name)
    assert len(told) >= 5
