"""The ladders of Triton's and cuTile's forward: what a rung is, and that each keeps the whole contract alone."""

from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

import multiattn
from multiattn import Problem
from multiattn.cutile import forward as cutile_ladder
from multiattn.cutile import rules as cutile_rules
from multiattn.plan.arch import by_name
from multiattn.plan.backend import find_variant, get, ladder, make_plan, plan_variant
from multiattn.plan.config import select
from multiattn.triton import ladder as triton_ladder
from multiattn.triton import plain as triton_configs
from multiattn.triton import rules as triton_rules

LANGUAGES = {"triton": triton_ladder, "cutile": cutile_ladder}
GROUPS = {
    "triton": {
        "math": ("exp2", "scale_after_max"),
        "memory": ("descriptor", "pipelined"),
        "finish": ("reciprocal", "heads_together", "registers"),
    },
    "cutile": {
        "math": ("exp2", "flush_to_zero", "scale_after_max"),
        "memory": ("k_transposed", "latency_hints"),
        "finish": ("approximate_division", "occupancy_hint", "lazy_max", "static_grid", "q_in_registers"),
    },
}
"""Fields of a step by what they save: between a rung and its parent, fields of one group differ."""
RULES = {"triton": triton_rules, "cutile": cutile_rules}
RUNGS = [(language, name) for language, steps in LANGUAGES.items() for name in steps.STEPS]
LADDERS = [
    ("triton", ("basic", "math", "memory", "full")),
    ("cutile", ("basic", "math", "memory", "full")),
]

each_language = pytest.mark.parametrize("language", LANGUAGES)
each_rung = pytest.mark.parametrize(("language", "name"), RUNGS)


def rung_of(language, name):
    return LANGUAGES[language].STEPS[name]


def step_class(language):
    return type(rung_of(language, "full").step)


def kernel_source(language, *names):
    folder = Path(multiattn.__file__).parent / language / "kernels"
    return "".join((folder / name).read_text() for name in names if (folder / name).exists())


@pytest.mark.parametrize(("language", "names"), LADDERS)
def test_ladders(language, names):
    assert tuple(variant.name for variant in ladder(get(language), names[-1])) == names


@each_language
def test_nobody_gets_a_rung_that_leads_to_another_unasked(language):
    tops = [names[-1] for who, names in LADDERS if who == language]
    on_none = {"triton": ["split_keys", "warp_specialized", "warp_specialized_twin"], "cutile": ["split_keys"]}
    alone = on_none.get(language, [])
    assert [variant.name for variant in get(language).forward.offered] == alone + tops
    grouped = [name for group in GROUPS[language].values() for name in group]
    assert sorted(grouped) == sorted(field.name for field in fields(step_class(language)))


@each_rung
def test_a_rung_differs_from_its_parent_in_one_group(language, name):
    rung, variant = rung_of(language, name), find_variant(get(language), name)
    assert dict(variant.flags) == asdict(rung.step)
    assert variant.parent == rung.parent
    if rung.parent is None:
        return
    ours, theirs = asdict(rung.step), asdict(rung_of(language, rung.parent).step)
    groups = GROUPS[language].items()
    assert len([group for group, names in groups if any(ours[each] != theirs[each] for each in names)]) == 1


@each_language
def test_every_field_is_in_the_kernel_or_limits_the_config(language):
    step = step_class(language)
    names = [field.name for field in fields(step)]
    everything = step(**dict.fromkeys(names, True))
    config = {
        "triton": triton_configs.TritonConfig(
            tile_m=64, tile_n=64, warps=4, stages=3, heads_together=8, registers=128, descriptors=True
        ),
        "cutile": cutile_ladder.FAMILY.config(tile_m=64, tile_n=64),
    }[language]
    assert everything.limit(config) == config
    kernel = kernel_source(language, "forward.py", "parts.py")
    for name in names:
        limits = replace(everything, **{name: False}).limit(config) != config
        assert limits != (f".step.{name}" in kernel if language == "triton" else f".{name}" in kernel), name


@each_rung
def test_what_is_planned_is_what_runs(language, name):
    """A config never asks for what a rung does not do: its own rules', nor a candidate, nor a caller's."""
    backend, variant = get(language), find_variant(get(language), name)
    step = rung_of(language, name).step
    for arch in variant.capability.arches:
        for head_dim in (40, 64, 128, 256):
            problem = Problem.contiguous(batch=1, heads_q=8, seq_q=4096, head_dim=head_dim, causal=True)
            if not getattr(step, "descriptor", True):
                problem = replace(problem, strides_k=(0, *problem.strides_k[1:]))  # so that the best has no descriptors
            plan = make_plan(backend, problem, by_name(arch), variant=name, probe=False)
            assert step.limit(plan.config) == plan.config
            best = make_plan(backend, problem, by_name(arch), variant="full", probe=False).config
            own, _ = select(RULES[language].OWN_RULES.get(name, ()), problem, by_name(arch))
            assert plan.config == (own.config if own is not None else step.limit(best))
            if best != plan.config:
                refused = plan_variant(backend, variant, problem, by_name(arch), best)
                assert "in this variant" in refused[0].allowed
            candidates = backend.forward.candidates(variant, problem, by_name(arch))
            assert all(step.limit(candidate) == candidate for candidate in candidates)
            assert len(set(candidates)) == len(candidates)
