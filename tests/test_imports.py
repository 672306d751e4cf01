"""Imports go one way, and importing the package costs nothing: no kernel language, no driver, no time."""

import ast
import functools
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import networkx
import pytest

import multiattn

ROOT = Path(multiattn.__file__).parent
# Who may import whom, by the first name below the package; a folder counts as one.
_BASES = {"plain", "layout", "mask", "block_mask", "packed", "sequences", "score"}
_DATA = {*_BASES, "validate", "operands", "problem"}
_LANGUAGE = {*_DATA, "plan", "run", "progress"}
ALLOWED = {
    "plain": set(),
    "told": set(),
    "meant": set(),
    "mask": {"plain"},
    "block_mask": {"layout", "score", "validate"},
    "blocks": {"block_mask", "mask", "plain", "score", "validate"},
    "packed": {"layout"},
    "sequences": {"layout", "packed"},
    "score": set(),
    "layout": set(),
    "validate": {"layout", "plain", "sequences"},
    "operands": {*_BASES, "validate"},
    "problem": {*_BASES, "validate", "operands"},
    "plan": _DATA,
    "bars": set(),
    "progress": set(),
    "run": {*_DATA, "plan", "progress", "told"},
    "reference": {*_DATA, "meant", "plan", "progress", "signatures"},
    "signatures": {"mask", "meant", "operands", "plan"},
    "truth": {*_DATA, "reference"},
    **dict.fromkeys(multiattn.BACKENDS, _LANGUAGE),
    "api": {*_DATA, "meant", "plan", "run", "varlen", "kvcache", "signatures"},
    "aot": {*_DATA, "plan", "run"},
    # cuda: `sanitize`
    "inspect": {*_DATA, "blocks", "plan", "run", "aot", "cuda", "progress", "bars", "varlen", "kvcache", "signatures"},
    "flex": {*_DATA, "meant", "plan", "api", "told"},
    # Nobody imports these.
    "integrations": {*_DATA, "meant", "plan", "run", "api", "kvcache", "merging", "signatures", "varlen"},
    "varlen": {*_DATA, "meant", "plan", "run", "signatures"},
    "kvcache": {*_DATA, "meant", "plan", "run", "signatures"},
    "quantizing": {*_DATA, "plan"},
    "merging": {"meant", "validate"},
    "nn": {*_DATA, "meant", "plan", "api", "signatures"},
    "__init__": {
        "problem",
        "plan",
        "run",
        "reference",
        "api",
        "blocks",
        "flex",
        "kvcache",
        "merging",
        "quantizing",
        "varlen",
        "nn",
    },
    "tune": {*_DATA, "plan", "run", "inspect", "truth", "bars"},
    "__main__": {"problem", "operands", "plan", "run", "inspect", "tune"},
}
LANGUAGES = ("triton", "cuda", "nvidia", "torch.utils.cpp_extension")


def module_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@functools.cache
def read(path):
    """Imports of a file, by full names, and its classes."""
    modules, classes = [], []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ClassDef):
            classes.append(node.name)
    return modules, classes


def test_imports_go_one_way_and_no_two_classes_have_one_name():
    places, wrong = defaultdict(list), []
    for path in sorted(ROOT.rglob("*.py")):
        me, (modules, classes) = module_of(path), read(path)
        # A script's folder goes on sys.path: run by its path, multiattn/x.py would see our `triton` as the real one.
        if path.name != "__main__.py" and path.read_text().startswith("#!"):
            wrong.append(f"{path} is a runnable script")
        for name in modules:
            top, *rest = name.split(".")
            if top in ("parity", "bench", "tests"):
                wrong.append(f"{path} imports {name}")
            if top == "multiattn" and rest and (ROOT / rest[0]).with_suffix(".py").exists() | (ROOT / rest[0]).is_dir():
                wrong += [f"{path} must not import {rest[0]}"] * (rest[0] not in ALLOWED[me] | {me})
        for name in classes:
            places[name].append(path.relative_to(ROOT))
    assert wrong == []
    assert {name: its for name, its in places.items() if len(its) > 1} == {}


def module_name(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("package", ["multiattn", "parity", "bench"])
def test_no_imports_go_in_a_circle(package):
    """Between files, those inside functions included; importing a module of a package is not importing the package."""
    paths = {module_name(path): path for path in sorted((ROOT.parent / package).rglob("*.py"))}
    graph = networkx.DiGraph()
    for module, path in paths.items():
        for name in read(path)[0]:
            target = name if name in paths else name.rpartition(".")[0]
            if target in paths and target != module:
                graph.add_edge(module, target)
    assert list(networkx.simple_cycles(graph)) == []


IMPORT = """
import importlib, importlib.util, json, os, sys, time
start = time.process_time()
import numpy, torch
of_torch = time.process_time() - start

def run(first):
    importlib.import_module(first)
    sys.pycache_prefix, sys.dont_write_bytecode = sys.argv[1], False  # with bytecode cached, as an installation has it
    before, start = set(sys.modules), time.process_time()
    import multiattn
    share = (time.process_time() - start) / of_torch
    from multiattn.plan import backend
    for name in multiattn.BACKENDS:
        backend.get(name)
    sys.pycache_prefix = None
    found = dict(share=share, modules=sorted(set(sys.modules) - before), driver=torch.cuda.is_initialized())
    specs = [importlib.util.find_spec(name) for name in ("triton", "cuda")]
    found["specs"] = [[it.origin, *(it.submodule_search_locations or [])] for it in specs if it is not None]
    from torch.utils.flop_counter import FlopCounterMode
    q = torch.randn(2, 4, 5, 8, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        multiattn.fmha(q, q, q, causal=True).sum().backward()
    print(json.dumps(found | dict(flops=counter.get_total_flops())), flush=True)

for first in ("json", "torch.utils.flop_counter", *["json"] * int(sys.argv[2])):
    if not (child := os.fork()):
        run(first)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_importing_costs_nothing_and_shadows_nothing(tmp_path):
    """No language, no driver, and 5 % of torch's own time at most: the process's, as a busy machine must not decide.

    Each child of one process, which has torch, imports the package after another module; they share their bytecode.
    """

    def importing(more):
        command = [sys.executable, "-W", "ignore", "-c", IMPORT, str(tmp_path), str(more)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return [json.loads(line) for line in done.stdout.splitlines()]

    found = importing(0)
    for it in found:
        assert not it["driver"]
        assert [name for name in it["modules"] if name.split(".")[0] in LANGUAGES] == []
        assert it["specs"]
        assert str(ROOT) not in json.dumps(it["specs"])
        # 15 visible pairs; backward counts 2.5 times forward. Whichever of the two modules is imported first.
        assert it["flops"] == 4 * 2 * 4 * 15 * 8 * 7 // 2
    assert found[1]["share"] < 0.05 or min(it["share"] for it in importing(8)[1:]) < 0.05
