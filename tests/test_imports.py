"""Imports go one way, and importing the package costs nothing: no kernel language, no driver, no time."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import networkx
import pytest

import multiattn

ROOT = Path(multiattn.__file__).parent
# Who may import whom, by the first name below the package; a folder counts as one.
_LANGUAGE = {"problem", "plan", "run"}
ALLOWED = {
    "mask": set(),
    "problem": {"mask"},
    "plan": {"problem"},
    "run": {"mask", "problem", "plan"},
    "reference": {"mask", "problem", "plan"},
    **dict.fromkeys(multiattn.BACKENDS, _LANGUAGE),
    "api": {"problem", "plan", "run"},
    "aot": {"problem", "plan", "run"},
    "inspect": {"problem", "plan", "run", "aot", "cuda"},  # cuda: `sanitize`
    "__init__": {"problem", "plan", "run", "reference", "api"},
    "__main__": {"problem", "plan", "inspect"},
}
LANGUAGES = ("triton", "cuda", "nvidia", "torch.utils.cpp_extension")


def module_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_modules(path):
    """Modules of this package that a file imports, by their first name below it; other packages by full name."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from names


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path):
    me = module_of(path)
    for name in imported_modules(path):
        top, *rest = name.split(".")
        assert top not in ("parity", "bench", "tests"), f"{path} imports {name}"
        if top == "multiattn" and rest and (ROOT / rest[0]).with_suffix(".py").exists() | (ROOT / rest[0]).is_dir():
            assert rest[0] in ALLOWED[me] | {me}, f"{me} must not import {rest[0]}"


def module_name(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("package", ["multiattn", "parity", "bench"])
def test_no_imports_go_in_a_circle(package):
    """Between files, those inside functions included; importing a module of a package is not importing the package."""
    paths = {module_name(path): path for path in sorted((ROOT.parent / package).rglob("*.py"))}
    graph = networkx.DiGraph()
    for module, path in paths.items():
        for name in imported_modules(path):
            target = name if name in paths else name.rpartition(".")[0]
            if target in paths and target != module:
                graph.add_edge(module, target)
    assert list(networkx.simple_cycles(graph)) == []


def run(code, *arguments):
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_importing_imports_no_language_and_asks_no_driver():
    after, initialised = run(
        "import json, sys, torch, numpy; before = set(sys.modules); import multiattn; "
        "from multiattn.plan import backend; [backend.get(name) for name in multiattn.BACKENDS]; "
        "print(json.dumps([sorted(set(sys.modules) - before), torch.cuda.is_initialized()]))"
    )
    assert not initialised
    foreign = [name for name in after if name.split(".")[0] in LANGUAGES]
    assert foreign == []


def test_importing_takes_under_50_ms_beyond_torch(tmp_path):
    """Of this process's own time, with bytecode cached as an installation has it: a busy machine must not decide."""
    code = (
        "import json, sys, time, torch; sys.pycache_prefix, sys.dont_write_bytecode = sys.argv[1], False; "
        "start = time.process_time(); import multiattn; print(json.dumps(time.process_time() - start))"
    )
    assert any(run(code, str(tmp_path)) < 0.050 for _ in range(12))


def test_the_ops_are_there_with_the_package():
    assert run(
        "import json, torch, multiattn; "
        "print(json.dumps([str(getattr(torch.ops.multiattn, name).default._schema) != '' "
        "for name in ('fmha_forward', 'fmha_backward')]))"
    ) == [True, True]


@pytest.mark.parametrize("first", ["multiattn", "torch.utils.flop_counter"])
def test_flops_are_counted_whichever_is_imported_first(first):
    total = run(
        f"import json, torch; import {first}; import multiattn; from torch.utils.flop_counter import FlopCounterMode\n"
        "q = torch.randn(2, 4, 5, 8, requires_grad=True)\n"
        "with FlopCounterMode(display=False) as counter:\n"
        "    multiattn.fmha(q, q, q, causal=True).sum().backward()\n"
        "print(json.dumps(counter.get_total_flops()))"
    )
    assert total == 4 * 2 * 4 * 15 * 8 * 7 // 2  # 15 visible pairs; backward counts 2.5 times forward


@pytest.mark.parametrize("name", ["triton", "cuda"])
def test_our_folders_do_not_shadow_the_real_packages(name):
    origin = run(
        f"import json, importlib.util, multiattn; spec = importlib.util.find_spec({name!r}); "
        "print(json.dumps([spec.origin, list(spec.submodule_search_locations or [])]))"
    )
    assert str(ROOT) not in json.dumps(origin)


def test_no_runnable_script_inside_the_package():
    """A script's folder goes on sys.path: run by its path, multiattn/x.py would see our `triton` as the real one."""
    for path in ROOT.rglob("*.py"):
        if path.name != "__main__.py":
            assert not path.read_text().startswith("#!"), path
