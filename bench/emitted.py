"""``python -m bench emitted``: kernels compiled elsewhere and loaded here: the driver's word on them, and parity."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from bench.environment import environment, results_dir
from bench.errors import InputError
from bench.results import Environment, read
from multiattn import aot
from multiattn.plan.arch import by_name, detect, occupancy
from multiattn.run.driver import attributes
from parity.cases import Case, suite
from parity.launch import forget, prepare_case
from parity.run import score
from parity.tensors import Outputs

SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What a kernel takes of an SM: registers and stack of a thread, static shared memory of a block, blocks an SM."""

    registers: int
    local_bytes: int
    static_smem_bytes: int
    blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """One emitted kernel: as its cubin has it, as the driver has it, and how it did in parity's cases; or an error."""

    name: str
    backend: str
    direction: str
    head_dim: int
    mask: str
    cubin: Usage | None = None
    driver: Usage | None = None
    passed: tuple[str, ...] = ()
    """Names of cases."""
    failed: tuple[str, ...] = ()
    """With what was wrong."""
    refused: int = 0
    """Cases of its head_dim, mask and dtype that the code does not hold for, by the loader's own word."""
    worst_ratio: float = 0.0
    """Of an error to its budget."""
    error: str = ""
    """Why it could not be loaded or launched."""

    @property
    def is_right(self) -> bool:
        """Whether driver and cubin agree, nothing failed and, of a forward, something passed."""
        agree = self.cubin is not None and self.cubin == self.driver
        return agree and not self.error and not self.failed and (self.direction != "forward" or bool(self.passed))

    @property
    def what_is_wrong(self) -> str:
        """In words; empty where nothing is."""
        if self.is_right:
            return ""
        words = [self.error, *self.failed]
        words += ["the driver says otherwise"] if self.cubin != self.driver else []
        return "; ".join(filter(None, words)) or "nothing of it passed"


def check_all(folder: Path, device: torch.device) -> Iterator[Loaded]:
    """Load every kernel of a folder that `multiattn compile --emit` wrote; ValueError for another folder."""
    for entry in aot.entries(folder):
        problem = entry["problem"]
        blank = Loaded(
            name=entry["name"],
            backend=entry["backend"],
            direction=entry["direction"],
            head_dim=problem["head_dim"],
            mask="causal" if problem["causal"] else "full",
        )
        try:
            yield check(blank, folder, entry, device)
        except Exception as error:  # broad: whatever it is, it is this kernel's, and the others are still to be loaded
            yield replace(blank, error=f"{type(error).__name__}: {error}")


def check(blank: Loaded, folder: Path, entry: Mapping[str, Any], device: torch.device) -> Loaded:
    """Load one kernel, ask the driver of it, and run what it can of parity's cases."""
    here, arch = detect(device), by_name(entry["arch"])
    if arch != here:
        raise ValueError(f"arch: got a kernel for {arch.name}; allowed {here.name}, which is here")
    registers, static = entry["registers"], entry["static_smem_bytes"]
    if registers is None:
        raise ValueError("registers: got none in the manifest; allowed a kernel emitted where there is a cuobjdump")
    cubin = aot.read_cubin(folder, entry)
    threads, dynamic = entry["threads"], entry["dynamic_smem_bytes"]
    told = attributes(cubin, entry["symbol"], torch.cuda.current_device(), threads=threads, dynamic_smem_bytes=dynamic)
    found = replace(
        blank,
        cubin=Usage(
            registers=registers,
            local_bytes=entry["spill_bytes"],
            static_smem_bytes=static,
            blocks=occupancy(arch, threads, registers, static + dynamic).blocks,
        ),
        driver=Usage(
            registers=told["registers"],
            local_bytes=told["local_bytes"],
            static_smem_bytes=told["static_smem_bytes"],
            blocks=told["blocks_per_sm"],
        ),
    )
    if entry["direction"] != "forward":
        return found
    return _with_parity(found, aot.load(folder, name=entry["name"]), device)


def _with_parity(found: Loaded, kernel: aot.Kernel, device: torch.device) -> Loaded:
    passed, failed, refused, worst = [], [], 0, 0.0
    for case in cases_of(kernel, device):
        forget()
        outcome, ratio = _run(case, kernel, device)
        worst = max(worst, ratio)
        if outcome == "passed":
            passed.append(case.name)
        elif outcome == "refused":
            refused += 1
        else:
            failed.append(f"{case.name}: {outcome}")
    passing, ratio = tuple(passed), round(worst, 4)
    return replace(found, passed=passing, failed=tuple(failed), refused=refused, worst_ratio=ratio)


def cases_of(kernel: aot.Kernel, device: torch.device) -> list[Case]:
    """Parity's cases of a kernel's head_dim, mask and dtype, but for those that fill the device; first its own problem.

    Code may assume of its own lengths and strides what holds for no other case.
    """
    problem = kernel.plan.problem
    own = Case(
        name="as_emitted",
        why="what the code was made for",
        batch=problem.batch,
        heads_q=problem.heads_q,
        heads_kv=problem.heads_kv,
        seq_q=problem.seq_q,
        seq_kv=problem.seq_kv,
        head_dim=problem.head_dim,
        dtype="fp16" if problem.dtype == "fp16" else "bf16",
        causal=problem.causal,
    )
    wanted = problem.head_dim, problem.causal, problem.dtype
    mine = [case for case in suite(device) if (case.head_dim, case.causal, case.dtype) == wanted]
    return [own, *(case for case in mine if case.size != "huge")]


def _run(case: Case, kernel: aot.Kernel, device: torch.device) -> tuple[str, float]:
    """``passed``, ``refused``, or what is wrong; and the worst error over its budget."""
    inputs, truth = prepare_case(case, device)
    problem = kernel.problem_of(inputs.q, inputs.k, inputs.v, scale=case.scale)
    if kernel.why_not(problem, device):
        return "refused", 0.0
    outputs = Outputs.of(problem, device)
    kernel(inputs.q, inputs.k, inputs.v, scale=case.scale, out=outputs.out, lse=outputs.lse)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if outputs.guards_were_written or inputs.were_written:
        return "memory around out or lse, or of q, k or v, was written", 0.0
    scores, complaint = score(outputs.all, truth.all)
    return complaint or "passed", max(it.ratio for it in scores)


# ---------------------------------------------------------------- kept and shown


def table(loaded: Sequence[Loaded]) -> str:
    """A row per kernel; where cubin and driver differ, both."""
    body = [
        (
            it.backend,
            it.direction,
            it.head_dim,
            it.mask,
            *(_both(it.cubin, it.driver, name) for name in Usage.__slots__),
            f"{len(it.passed)} passed, {len(it.failed)} failed, {it.refused} refused"
            if it.direction == "forward"
            else "-",
            f"{it.worst_ratio:.2f}",
        )
        for it in loaded
    ]
    usage = ("registers", "stack", "static smem", "blocks")
    return tabulate(body, headers=("backend", "direction", "D", "mask", *usage, "parity", "worst ratio"))


def _both(cubin: Usage | None, driver: Usage | None, name: str) -> str:
    if cubin is None or driver is None:
        return "-"
    mine, its = getattr(cubin, name), getattr(driver, name)
    return str(mine) if mine == its else f"{mine}, driver {its}"


def save(loaded: Sequence[Loaded], setup: Environment, path: Path) -> None:
    """Write as JSON, a line per kernel."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps({"schema": SCHEMA, "environment": asdict(setup)}, indent=1).removesuffix("\n}")
    rows = ",\n  ".join(json.dumps(asdict(it)) for it in loaded)
    path.write_text(f'{head},\n "kernels": [\n  {rows}\n ]\n}}\n')


def load(path: Path) -> list[Loaded]:
    """Kernels that `save` wrote; InputError for another file."""

    def kernels(data: dict[str, Any]) -> list[Loaded]:
        return [_parse(it) for it in data["kernels"]]

    return read(path, f"a file of schema {SCHEMA} that python -m bench emitted wrote", SCHEMA, kernels)


def _parse(data: Mapping[str, Any]) -> Loaded:
    given = {name: None if data[name] is None else Usage(**data[name]) for name in ("cubin", "driver")}
    return Loaded(**{**data, **given, "passed": tuple(data["passed"]), "failed": tuple(data["failed"])})


def run(options: argparse.Namespace) -> int:
    """Load kernels that `multiattn compile --emit` wrote, compare them with the driver's word, run parity's cases."""
    if not torch.cuda.is_available():
        raise InputError("there is no GPU to load kernels on; python -m multiattn compile --emit needs none")
    device = torch.device("cuda", torch.cuda.current_device())
    setup, loaded = environment(), list[Loaded]()
    path = (options.out or results_dir(setup.gpu)) / "emitted.json"
    try:
        for folder in options.folders:
            for it in check_all(folder, device):
                loaded.append(it)
                save(loaded, setup, path)
    except ValueError as error:
        raise InputError(str(error)) from None
    print(table(loaded))
    wrong = [it for it in loaded if not it.is_right]
    print("".join(f"{it.name}: {it.what_is_wrong}\n" for it in wrong), end="")
    print(f"{len(loaded)} kernels, {len(wrong)} failures. Written: {path}")
    return int(bool(wrong) or not loaded)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of the command."""
    command.add_argument("folders", type=Path, nargs="+", help="folders that multiattn compile --emit wrote")
    command.add_argument("--out", type=Path, help="folder of the results; default bench/results/<gpu>")
