"""``python -m multiattn compile``: the chosen Plans compiled for every target, in parallel, with no GPU."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import multiattn
from multiattn.bars import Bar
from multiattn.inspect import build, emit, remarks, tables
from multiattn.inspect.build import Compilation, Request
from multiattn.inspect.options import (
    HeadDims,
    add_backends,
    add_problem,
    check_work,
    count,
    directions_of,
    gpu_arches,
    head_dims,
    layer,
    masks,
    masks_of,
    sizes_given,
    table,
    with_features,
)
from multiattn.plan import backend as registry
from multiattn.plan.arch import GPU_ARCHS
from multiattn.plan.backend import BACKENDS, DIRECTIONS

HEAD_DIMS = (64, 128, 256)
SEQ = 4096
TIMEOUT_S = 300
VARIANTS = ("offered", "all")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_problem(command, required=False)
    what = f"of {', '.join(GPU_ARCHS)}, or names of GPUs; default: all"
    command.add_argument("--arch", action="extend", type=gpu_arches, metavar="A,B,...", help=what)
    add_backends(command)
    command.add_argument(
        "--mask",
        action="extend",
        type=masks,
        metavar="A,B,...",
        help="of full, causal, window:LEFT:RIGHT; default: the first two",
    )
    command.add_argument("--direction", choices=(*DIRECTIONS, "both"), default="both", help="default: %(default)s")
    told = "where there is no shape; default: 64,128,256, with 16k tokens, H*D=2048, S=4096"
    command.add_argument("--head-dim", action="extend", type=head_dims, metavar="D[/Dv],...", help=told)
    command.add_argument("--variant", help="offered, all, or a name; default: the best for each problem")
    command.add_argument("--jobs", type=count, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    command.add_argument(
        "--timeout", type=count, default=TIMEOUT_S, metavar="S", help="for one plan (default: %(default)s)"
    )
    command.add_argument("--long", action="store_true", help="print a line for every kernel")
    command.add_argument("--remarks", action="store_true", help="print what cuTile's compiler says of each source line")
    command.add_argument("--json", type=Path, metavar="FILE", help="write all that is known of every kernel")
    kinds = f"write code for use ahead of time: {','.join(emit.KINDS)}, with a manifest.json"
    command.add_argument("--emit", nargs=2, metavar=("KINDS", "DIR"), help=kinds)


def run(options: argparse.Namespace) -> int:
    """Compile; 1 where a compiler failed or nothing of a backend was compiled."""
    wanted = wanted_requests(options)
    if options.emit is None:
        return _compile(wanted, options)
    if idle := [name for name in ("json", "long", "remarks") if getattr(options, name)]:
        raise ValueError(f"--emit: got it with --{' and --'.join(idle)}; allowed one or the other")
    kinds, folder = options.emit[0].split(","), Path(options.emit[1])
    if wrong := [kind for kind in kinds if kind not in emit.KINDS]:
        raise ValueError(f"--emit: got {', '.join(wrong)}; allowed {', '.join(emit.KINDS)}")
    return emit.run(wanted, kinds, folder, jobs=options.jobs, timeout_s=options.timeout)


def _compile(wanted: Sequence[Request], options: argparse.Namespace) -> int:
    """Compile, print and save; OSError, before anything is compiled, for a file that cannot be written to."""
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.open("a").close()
    entries = compile_all(wanted, jobs=options.jobs, timeout_s=options.timeout)
    print(tables.detailed(entries) if options.long else tables.text_table(entries))
    if options.remarks:
        _print_remarks(entries)
    if options.json is not None:
        options.json.write_text(json.dumps(list(map(asdict, build.ordered(entries))), indent=1) + "\n")
    return verdict(entries)


def compile_all(wanted: Sequence[Request], *, jobs: int, timeout_s: float = TIMEOUT_S) -> list[Compilation]:
    """Compile requests, and print a line for each as it ends."""
    entries = []
    with Bar(total=len(wanted), desc="compiling", unit="plan", disable=None) as bar:  # None: silent in a log
        for entry in build.build(wanted, jobs=jobs, timeout_s=timeout_s):
            entries.append(entry)
            with bar.external_write_mode():
                print(f"[{len(entries)}/{len(wanted)}] {entry.request}: {entry.text}", flush=True)
            bar.update()
    return entries


def verdict(entries: Sequence[Compilation]) -> int:
    """Print how many requests compiled; 1 where a compiler failed or nothing of a backend was compiled."""
    made = [entry.request for entry in entries if entry.ok]
    refused, failed = (sum(map(bool, found)) for found in zip(*((it.reasons, it.error) for it in entries), strict=True))
    print(f"\n{len(entries)} plans: {len(made)} compiled, {refused} refused, {failed} failed")
    return int(build.print_idle([entry.request for entry in entries], made) or failed > 0)


def wanted_requests(options: argparse.Namespace) -> list[Request]:
    """The requests of the options; ValueError for an unknown variant, or sizes that contradict or need no kernel."""
    batch, heads, seq, head_dim, *_, head_dim_v = options.shape or (None, None, SEQ, None, None)
    head_dims = options.head_dim or [HeadDims(it, it) for it in HEAD_DIMS]
    if head_dim is not None:
        its = HeadDims(head_dim, head_dim if head_dim_v is None else head_dim_v)
        if options.head_dim not in (None, [its]):
            asked = ", ".join(map(str, options.head_dim))
            raise ValueError(f"--head-dim: got {asked} with a shape of D={its}; allowed one of the two")
        head_dims = [its]
    sizes = {"batch": batch, "heads": heads, "scale": options.scale, **sizes_given(options)}
    problems = [
        with_features(layer(dim, seq, mask, head_dim_v=dim_v, dtype=options.dtype, **sizes), options)
        for dim, dim_v in head_dims
        for mask in masks_of(options)
    ]
    for problem in problems:
        check_work(problem)
    directions = directions_of(options)
    backends = options.backend or BACKENDS
    if options.variant not in (None, *VARIANTS) and options.backend:
        for backend in map(registry.get, backends):
            if not any(it.name == options.variant for direction in directions for it in backend.op(direction).variants):
                registry.find_variant(backend, options.variant, directions[0])  # says which there are
    arches = options.arch or GPU_ARCHS
    found = build.requests(problems, backends=backends, arches=arches, directions=directions, variant=options.variant)
    if not found:
        allowed = f"{', '.join(VARIANTS)}, or a name that python -m multiattn explain prints"
        raise ValueError(f"--variant: got {options.variant!r}, which none of these backends has; allowed {allowed}")
    return found


def _print_remarks(entries: Sequence[Compilation]) -> None:
    folder = Path(multiattn.__file__).parent / "cutile" / "kernels"
    sources = {path.name: path.read_text().splitlines() for path in folder.rglob("*.py")}
    for entry in build.ordered(entries):
        for kernel in entry.kernels:
            if kernel.remarks:
                print(f"\n{entry.request}, {kernel.name}")
                print(table(remarks.table(kernel.remarks, sources), ("line", "chosen", "source")))
