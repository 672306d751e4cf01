"""The ladders of Triton's and cuTile's forward: what a rung is, and that each keeps the whole contract alone."""

import ast
from collections import Counter
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch

import multiattn
from multiattn import Plan, Problem
from multiattn.cutile import configs as cutile_configs
from multiattn.cutile import ladder as cutile_ladder
from multiattn.cutile import rules as cutile_rules
from multiattn.plan.arch import ARCHS, by_name
from multiattn.plan.backend import find_variant, get, ladder, make_plan, plan_variant
from multiattn.plan.config import Rule, select
from multiattn.triton import configs as triton_configs
from multiattn.triton import ladder as triton_ladder
from multiattn.triton import rules as triton_rules
from parity.cases import Case
from parity.launch import launch_plan, plan_case, prepare_case
from parity.results import Contender

LANGUAGES = {"triton": triton_ladder, "cutile": cutile_ladder}
RULES = {"triton": triton_rules, "cutile": cutile_rules}
RUNGS = [(language, name) for language, steps in LANGUAGES.items() for name in steps.STEPS]
LADDERS = [
    ("triton", ("basic", "math", "memory", "full")),
    ("triton", ("basic", "math", "pointer_memory", "pointer_full")),
    ("cutile", ("basic", "math", "memory", "full")),
]
CPU = torch.device("cpu")

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
    alone = ["warp_specialized"] if language == "triton" else []  # on no ladder
    assert [variant.name for variant in get(language).forward.offered] == alone + tops


@each_language
def test_every_field_is_of_one_group(language):
    grouped = [name for group in LANGUAGES[language].GROUPS.values() for name in group]
    assert sorted(grouped) == sorted(field.name for field in fields(step_class(language)))


@each_rung
def test_a_rung_differs_from_its_parent_in_one_group(language, name):
    rung, variant = rung_of(language, name), find_variant(get(language), name)
    assert dict(variant.flags) == asdict(rung.step)
    assert variant.parent == rung.parent
    if rung.parent is None:
        return
    ours, theirs = asdict(rung.step), asdict(rung_of(language, rung.parent).step)
    groups = LANGUAGES[language].GROUPS.items()
    assert len([group for group, names in groups if any(ours[each] != theirs[each] for each in names)]) == 1


def conditions_on(source: str, names: set[str]) -> Counter[str]:
    """How many conditions of a module's source hang on each name: a variable, an attribute, or what was made of one.

    A name goes on into variables that it is assigned to and parameters of the module's functions that it is given to,
    but not through calls: what a function returns is a value, no constant of the rung.
    """
    tree = ast.parse(source)
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    known: dict[str, dict[str, set[str]]] = {function: {} for function in functions}

    def mentioned(node: ast.AST, function: str) -> set[str]:
        if isinstance(node, ast.Call):
            return set()
        found: set[str] = set()
        if isinstance(node, ast.Attribute):
            found = {node.attr} & names
        if isinstance(node, ast.Name):
            found = ({node.id} & names) | known[function].get(node.id, set())
        return found.union(*(mentioned(child, function) for child in ast.iter_child_nodes(node)))

    def learn(function: str, variable: str, value: ast.expr, where: str) -> bool:
        new = mentioned(value, where) - known[function].get(variable, set())
        known[function].setdefault(variable, set()).update(new)
        return bool(new)

    def walk(function: str) -> bool:
        changed = False
        for node in ast.walk(functions[function]):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                changed |= learn(function, node.targets[0].id, node.value, function)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions:
                callee = node.func.id
                parameters = [argument.arg for argument in functions[callee].args.args]
                given = [*zip(parameters, node.args, strict=False), *((word.arg, word.value) for word in node.keywords)]
                for parameter, value in given:
                    changed |= learn(callee, parameter, value, function)
        return changed

    while sum(walk(function) for function in functions):  # each in turn, until none learns anything
        pass
    count: Counter[str] = Counter()
    for function, body in functions.items():
        for node in ast.walk(body):
            tests = [node.test] if isinstance(node, (ast.If, ast.IfExp, ast.While, ast.Assert)) else []
            tests += node.ifs if isinstance(node, ast.comprehension) else []
            for test in tests:
                count.update(mentioned(test, function))
    return count


@each_language
def test_the_kernel_tests_each_field_once(language):
    """A rung is a row of the table and, if it brings a field, one constant condition in the kernel."""
    source = kernel_source(language, "forward.py")
    names = {field.name for field in fields(step_class(language))}
    count = conditions_on(source, names)
    assert {"exp2", "scale_after_max"} <= count.keys()
    assert set(count.values()) == {1}


@pytest.mark.parametrize(
    "kernel",
    [
        "if STEP.exp2: pass\n    y = 1 if shape.exp2 else 2",
        "if exp2: pass\n    twice(exp2)",
        "if exp2: pass\n    twice(flag=STEP.exp2)",
        "if exp2: pass\n    same = not exp2\n    if same and y: pass",
    ],
)
def test_a_field_that_is_tested_twice_is_noticed(kernel):
    helper = "def twice(flag):\n    if flag: pass\n"
    assert conditions_on(f"{helper}def kernel():\n    {kernel}\n", {"exp2"}) == {"exp2": 2}
    assert conditions_on(f"{helper}def kernel():\n    if exp2: pass\n    if f(exp2): pass\n", {"exp2"}) == {"exp2": 1}


@each_language
def test_every_field_is_in_the_kernel_or_limits_the_config(language):
    step = step_class(language)
    names = [field.name for field in fields(step)]
    everything = step(**dict.fromkeys(names, True))
    config = {
        "triton": triton_configs.TritonConfig(
            tile_m=64, tile_n=64, num_warps=4, num_stages=3, heads_together=8, registers=128
        ),
        "cutile": cutile_configs.CutileConfig(tile_m=64, tile_n=64),
    }[language]
    assert everything.limit(config) == config
    kernel = kernel_source(language, "forward.py", "parts.py")
    for name in names:
        limits = replace(everything, **{name: False}).limit(config) != config
        assert limits != (f".{name}" in kernel), name


@each_rung
def test_what_is_planned_is_what_runs(language, name):
    """A config never asks for what a rung does not do: its own rules', nor a candidate, nor a caller's."""
    backend, variant = get(language), find_variant(get(language), name)
    step = rung_of(language, name).step
    top = ladder_top(language, name)
    for arch in variant.capability.arches:
        for head_dim in (40, 64, 128, 256):
            problem = Problem.contiguous(batch=1, heads_q=8, seq_q=4096, head_dim=head_dim, causal=True)
            plan = make_plan(backend, problem, by_name(arch), variant=name, probe=False)
            assert step.limit(plan.config) == plan.config
            best = make_plan(backend, problem, by_name(arch), variant=top, probe=False).config
            own, _ = select(RULES[language].OWN_RULES.get(name, ()), problem, by_name(arch))
            assert plan.config == (own.config if own is not None else step.limit(best))
            if best != plan.config:
                refused = plan_variant(backend, variant, problem, by_name(arch), best)
                assert "in this variant" in refused[0].allowed
            candidates = backend.forward.candidates(variant, problem, by_name(arch))
            assert all(step.limit(candidate) == candidate for candidate in candidates)
            assert len(set(candidates)) == len(candidates)


def ladder_top(language, name):
    if language == "cutile":
        return "full"
    return "full" if rung_of(language, name).step.descriptor else "pointer_full"


@each_language
def test_rules_of_its_own_come_first(language, monkeypatch):
    config = {
        "triton": triton_configs.TritonConfig(tile_m=16, tile_n=16, num_warps=4, num_stages=1),
        "cutile": cutile_configs.CutileConfig(tile_m=16, tile_n=16, occupancy=None, k_latency=None, v_latency=None),
    }[language]
    own = Rule(arches=("sm90",), config=config, why="measured", head_dim_max=128)
    module = RULES[language]
    monkeypatch.setattr(module, "OWN_RULES", {**module.OWN_RULES, "math": (own,)})
    rules = module.rules_of("math")
    assert rules[0] == own
    assert {arch for rule in rules[1:] for arch in rule.arches} == set(ARCHS)
    assert not any(own.covers(rule) for rule in rules[1:])
    assert any("sm90" in rule.arches and rule.head_dim_max > 128 for rule in rules[1:])


RAGGED = Case(
    name="ladder_ragged_gqa", why="both loops, a ragged end, a diagonal off the tiles, q negated", batch=2, heads_q=6,
    causal=True, scale=-0.2, head_dim=40, seq_q=70, seq_kv=131, dtype="fp16",
)  # fmt: skip
EMPTY = Case(name="ladder_empty_rows", why="90 rows see no key", causal=True, heads_q=4, seq_q=203, seq_kv=113)
FULL = Case(name="ladder_scale_zero", why="no mask, uniform weights", scale=0.0, head_dim=16, seq_q=40, seq_kv=150)


@each_rung
@pytest.mark.parametrize("case", [RAGGED, EMPTY, FULL], ids=str)
def test_each_rung_alone_is_attention(language, name, case):
    if reasons := get(language).probe(by_name("cpu")):
        pytest.skip("; ".join(map(str, reasons)))
    inputs, truth = prepare_case(case, CPU)
    plan = plan_case(case, Contender(backend=language, variant=name), inputs)
    assert isinstance(plan, Plan)
    for got, expected in zip(launch_plan(plan, inputs).all, truth.all, strict=True):
        expected.check(got, plan)


SMALL = triton_configs.TritonConfig(tile_m=64, tile_n=32, num_warps=4, num_stages=2)  # soon compiled


@pytest.mark.parametrize(
    ("language", "name", "arch"),
    [("triton", "memory", "sm100"), ("cutile", "memory", "sm100"), ("triton", "memory", "sm80")],
)
def test_a_rung_below_the_top_compiles_without_a_gpu(language, name, arch):
    """`bench record --check` compiles every rung for sm80 and sm90."""
    backend, variant, step = get(language), find_variant(get(language), name), rung_of(language, name).step
    if reasons := backend.probe_compiler():
        pytest.skip("; ".join(map(str, reasons)))
    problem = Problem.contiguous(batch=1, heads_q=4, heads_kv=2, seq_q=1000, head_dim=64)
    config = step.limit(SMALL) if language == "triton" else None
    plan = plan_variant(backend, variant, problem, by_name(arch), config)
    if not isinstance(plan, Plan):
        assert (arch, getattr(step, "descriptor", False)) == ("sm80", True)
        return
    (compiled,) = backend.forward.export(plan, ())
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.dynamic_smem_bytes <= plan.arch.smem_per_block
