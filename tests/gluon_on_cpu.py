"""Launches of the Gluon kernel on CPU tensors: any config, any order of partitions, and its source with a change."""

import contextlib
import importlib
import itertools
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch

import multiattn
from multiattn.plan.arch import by_name
from multiattn.plan.backend import Plan, find_variant, plan_variant
from multiattn.triton import BACKEND, launch
from multiattn.triton.cpu.gluon import run
from multiattn.triton.gluon_forward import GluonConfig
from multiattn.triton.kernels import gluon as kernels
from parity.cases import CASES
from parity.launch import prepare_case, problem_of
from parity.tensors import Outputs

CPU = torch.device("cpu")
VARIANT = find_variant(BACKEND, "warp_specialized")
PLAIN = GluonConfig(tile_m=128, tile_n=64, stages=3)
_NAMES = {case.name: case for case in CASES}
_numbers = itertools.count()


def case_of(name, **changes):
    """A case of the parity suite, with changes."""
    return replace(_NAMES[name], name=f"{name} {changes}", **changes)


def launched(case, config=PLAIN, seed=None, kernel=None):
    """The outputs of a launch, its plan and the truth."""
    inputs, truth = prepare_case(case, CPU)
    plan = plan_variant(BACKEND, VARIANT, problem_of(case, inputs), by_name("cpu"), config)
    assert isinstance(plan, Plan), plan
    outputs = Outputs.of(plan.problem, CPU)
    with _runs(kernel, seed):
        given = {name: getattr(inputs, name) for name in ("q", "k", "v", "sinks", "captured", "indices")}
        multiattn.launch(plan, **given, out=outputs.out, lse=outputs.lse)
    assert not outputs.guards_were_written
    assert not inputs.were_written
    return outputs, plan, truth


def check(case, config=PLAIN, seed=None, kernel=None):
    """Mismatch where out or lse is not what it is in fp64."""
    outputs, plan, truth = launched(case, config, seed, kernel)
    for got, expected in zip(outputs.all, truth.of_plan(plan), strict=True):
        expected.check(got, plan)


@contextlib.contextmanager
def _runs(kernel, seed):
    """Launches run `kernel`, in the order of a seed."""
    before = launch._run_gluon
    launch._run_gluon = lambda call, arguments: run(kernel or call.kernel, call.table.grid, *arguments, seed=seed)
    try:
        yield
    finally:
        launch._run_gluon = before


def changed(folder, file, *changes):
    """The kernel from a copy of its source, in which each text of `changes` that there is once has become another."""
    name = f"changed_gluon_{next(_numbers)}"
    home = Path(kernels.__file__).parent
    shutil.copytree(home, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (folder / name).glob("*.py"):
        text = path.read_text()
        if path.name == file:
            for old, new in changes:
                assert text.count(old) == 1, (old, text.count(old))
                text = text.replace(old, new)
        path.write_text(text.replace("multiattn.triton.kernels.gluon", name))
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(f"{name}.forward").attention_forward
    finally:
        sys.path.remove(str(folder))
