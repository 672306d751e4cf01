"""Configs that no kernel is made for, of every family: each is refused with what came and what is allowed."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from multiattn import Problem
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import find_variant, get, plan_variant
from multiattn.sequences import Batching

SM90 = ARCHS["sm90"]
SMEM = "232448 bytes a block on sm90"
POWERS = "powers of two from 16"


def problem(head_dim: int, page: int | None = None, **more: Any) -> Problem:
    sizes = {"batch": 2, "heads_q": 8, "heads_kv": 2, "seq_q": 300, "seq_kv": 500, "head_dim": head_dim} | more
    if page is not None:
        pages = -(-500 // page)
        sizes |= {"seq_kv": pages * page, "batching": Batching.cached(2, 2 * pages, page, pages)}
    return Problem.contiguous(**sizes)


# Of each family its fields, then head_dim, what differs from them, what came and what is allowed.
# No fields: those of the rule for this head_dim.
ROWS: dict[tuple[str, str, str], tuple[dict[str, Any] | None, tuple[tuple[int, dict[str, Any], str, str], ...]]] = {
    ("triton", "forward", "full"): ({"tile_m": 64, "tile_n": 64, "warps": 4, "stages": 2}, (
        (64, {"tile_m": 48}, "tile_m=48", POWERS),
        (64, {"tile_n": 8}, "tile_n=8", POWERS),
        (64, {"warps": 3}, "warps=3", ""),
        (64, {"stages": 0}, "stages=0", ""),
        (256, {"tile_m": 128, "tile_n": 128, "warps": 8, "stages": 4}, "bytes of shared memory", SMEM),
    )),
    ("triton", "forward", "split_keys"): ({"tile_m": 16, "tile_n": 64, "warps": 4, "stages": 3}, (
        (64, {"tile_m": 8}, "tile_m=8", POWERS),
        (64, {"tile_n": 48}, "tile_n=48", POWERS),
        (64, {"splits": 257}, "splits=257", ""),
        (64, {"blocks_per_sm": 0, "splits": 257}, "blocks_per_sm=0", ""),
        (128, {"tile_m": 64, "tile_n": 256}, "bytes of shared memory", SMEM),
    )),
    ("triton", "forward", "warp_specialized"): ({"tile_m": 128, "tile_n": 128, "stages": 4, "q_slots": 2}, (
        (128, {"tile_m": 64}, "tile_m=64", "128, 192"),
        (128, {"tile_n": 96}, "tile_n=96", "16, 32, 64, 128, 256"),
        (128, {"stages": 1}, "stages=1", "2 to 16"),
        (128, {"scheduler": "lpt"}, "scheduler=lpt", "one_tile, static, dynamic"),
        (128, {"q_slots": 0}, "q_slots=0", "1, 2, 3"),
        (128, {"stages": 9}, "bytes", SMEM),
        (128, {"tile_m": 192}, "160 registers for output, scores and weights", ""),
    )),
    ("triton", "backward", "warp_specialized"): (None, (
        (128, {"tile_m": 128}, "tile_m=128", "64"),
        (128, {"tile_n": 64}, "tile_n=64", "128"),
        (128, {"q_stages": 2}, "q_stages=2", "3 to 8"),
        (128, {"q_stages": 6}, "bytes", SMEM),
        (128, {"early_scores": True}, "256 registers for gradients, scores and weights", ""),
    )),
    ("triton", "backward", "warp_specialized_two_pass"): (None, (
        (128, {"tile_m": 128}, "tile_m=128", "64"),
        (128, {"tile_n": 128}, "tile_n=128", "64"),
        (128, {"q_stages": 1}, "q_stages=1", "2 to 8"),
        (128, {"v_stages": 0}, "v_stages=0", "1 to 8"),
        (128, {"k_stages": 8}, "bytes", SMEM),
        (200, {"kv_in_registers": True}, "", ""),  # a gradient of D=256 takes 128 registers, K would take 64 more
        (256, {"kv_in_registers": True}, "", ""),
    )),
    ("cutile", "forward", "split_keys"): ({"tile_m": 16, "tile_n": 64}, (
        (128, {"tile_m": 256}, "tile_m=256", f"{POWERS} to 128"),
        (128, {"tile_n": 8}, "tile_n=8", f"{POWERS} to 256"),
        (128, {"latency": 0}, "latency=0", "1 to 10"),
        (128, {"splits": 300}, "splits=300", "0 to 256"),
    )),
    ("cuda", "forward", "wgmma"): ({"tile_m": 128, "tile_n": 64}, (
        (64, {"tile_m": 96}, "tile_m=96", "128, 192"),
        (64, {"tile_n": 72}, "tile_n=72", "multiples of 16"),
        (64, {"tile_n": 272}, "tile_n=272", "from 16 to 256"),
        (64, {"cluster": 3, "scheduler": "static"}, "cluster=3", "1, 2"),
        (64, {"cluster": 2}, "scheduler=dynamic with cluster=2", "one_tile, static"),
        (64, {"stages": 2}, "stages=2", "3 to 16"),
        (64, {"scheduler": "random"}, "scheduler=random", "one_tile, static, dynamic"),
        (64, {"q_slots": 4}, "q_slots=4", "1, 2, 3"),
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
        (64, {"tile_m": 32}, "tile_m=32", "64"),
        (64, {"tile_n": 64}, "tile_n=64", "128"),
        (64, {"k_stages": 3}, "k_stages=3", "1, 2"),
        (64, {"q_stages": 1}, "q_stages=1", "2 to 8"),
    )),
    ("cuda", "backward", "wgmma_two_pass"): ({"tile_m": 64, "tile_n": 64}, (
        (256, {"kv_in_registers": True}, "", "up to 208"),
        (200, {"kv_in_registers": True}, "", "D up to 192"),
        (192, {"tile_m": 32}, "tile_m=32", "64"),
        (192, {"tile_n": 128}, "tile_n=128", "64"),
        (192, {"q_stages": 1}, "q_stages=1", "2 to 8"),
        (192, {"dout_stages": 9}, "dout_stages=9", "2 to 8"),
        (192, {"k_stages": 1}, "k_stages=1", "2 to 8"),
        (192, {"v_stages": 0}, "v_stages=0", "1 to 8"),
        (192, {"ahead": True, "dq_ahead": True, "dp_late": True}, "", "one of them"),
        (256, {"q_stages": 3}, "bytes", SMEM),
        (256, {"v_stages": 2}, "bytes", SMEM),
    )),
    ("cuda", "backward", "atomic"): ({"tile_m": 64, "tile_n": 128, "warps": 8, "stages": 2}, (
        (128, {"tile_m": 40}, "", "tile_m in multiples of 16"),
        (128, {"tile_n": 96}, "", "tile_n in multiples of 16 per pair of warps"),
        (128, {"warps": 6, "tile_n": 48}, "", "2, 4, 8, 16"),
        (128, {"stages": 3}, "stages=3", "1, 2"),
        (128, {"tile_n": 256}, "bytes", SMEM),
    )),
    ("cuda", "backward", "two_pass"): (None, (
        (128, {"dq": None}, "", "a QueryConfig as dq"),
        (128, {"dq.tile_m": 48}, "", "dq: tile_m in multiples of 16 per warp"),
        (128, {"dq.stages": 3}, "stages=3", "1, 2"),
    )),
}  # fmt: skip
OF_PAGES = (
    (64, {"tile_m": 96}, "tile_m=96", "64, 128, 192"),
    (64, {"tile_n": 72}, "tile_n=72", "multiples of 16"),
    (64, {"stages": 2}, "stages=2", "3 to 16"),
    (64, {"splits": 300}, "splits=300", "1 to 256"),
    (64, {"tile_m": 64, "pingpong": True}, "pingpong with tile_m=64", "128, 192"),
    (192, {"tile_n": 240, "stages": 3}, "244 registers", "up to 208 with 2 warpgroups"),
    (192, {"tile_n": 192, "stages": 3, "q_in_registers": True}, "with 208 registers for all else", "up to 188"),
    (64, {"stages": 16}, "295424 bytes", SMEM),
    (64, {"gathers": True, "tile_m": 192}, "gathers with tile_m=192", "64, 128"),
    (192, {"gathers": True, "tile_n": 144, "stages": 3}, "gathers with tile_n=144", "up to 128"),
    (8, {"tile_n": 256, "stages": 3}, "boxes for 256 keys in pages of 8", ""),
)
"""Hopper's forward over caches: keys of a page come first."""


def changed(config: Any, changes: dict[str, Any]) -> Any:
    """A config with other fields; `dq.` begins those of one within."""
    for name, value in changes.items():
        outer, _, inner = name.partition(".")
        config = replace(config, **{outer: changed(getattr(config, outer), {inner: value}) if inner else value})
    return config


def check(whose: tuple[str, str, str], asked: Problem, config: Any, got: str, allowed: str) -> None:
    variant = find_variant(get(whose[0]), whose[2], whose[1])
    reasons = variant.fits(asked, SM90, config)
    told = [(it.code, it.got, it.allowed) for it in reasons]
    assert any(code in ("config", "page") and got in came and allowed in may for code, came, may in told), told


@pytest.mark.parametrize(
    ("whose", "head_dim", "changes", "got", "allowed"),
    [(whose, *row) for whose, (_, rows) in ROWS.items() for row in rows],
    ids=lambda it: "-".join(it) if isinstance(it, tuple) else str(it),
)
def test_a_config_that_does_not_fit_is_a_reason(whose, head_dim, changes, got, allowed):
    name, direction, own = whose
    variant, given = find_variant(get(name), own, direction), ROWS[whose][0]
    asked = problem(head_dim, **({"seq_q": 1} if own == "split_keys" else {}))
    if given is None:
        config = plan_variant(get(name), variant, asked, SM90, direction=direction).config
    else:
        config = variant.config_type(**given)
    check(whose, asked, changed(config, changes), got, allowed)


@pytest.mark.parametrize(("page", "changes", "got", "allowed"), OF_PAGES, ids=str)
def test_a_config_for_pages_that_does_not_fit_is_a_reason(page, changes, got, allowed):
    whose = ("cuda", "forward", "split_keys_wgmma")
    config = find_variant(get("cuda"), whose[2]).config_type(tile_m=128, tile_n=64, stages=4, splits=1)
    check(whose, problem(128, page=page, seq_q=16), changed(config, changes), got, allowed)


WRONG = {"tile_m": 48, "tile_n": 8, "occupancy": 0, "latency": 11, "warps": 16, "heads_together": 0}
"""By the ends of the names of fields: what no kernel of cuTile's has."""


@pytest.mark.parametrize("own", ["two_pass", "atomic", "stored"])
def test_each_field_of_cutiles_backwards_has_limits(own):
    variant, asked = find_variant(get("cutile"), own, "backward"), problem(64)
    config = plan_variant(get("cutile"), variant, asked, SM90, direction="backward").config
    for field in fields(config):
        for end, value in WRONG.items():
            if field.name.endswith(end):
                told = [it.got for it in variant.fits(asked, SM90, replace(config, **{field.name: value}))]
                assert f"{field.name}={value}" in told
