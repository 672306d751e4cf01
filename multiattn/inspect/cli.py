"""``python -m multiattn compile``: every chosen Plan compiled for every target, in parallel, with no GPU."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from multiattn.inspect import build, emit, tables
from multiattn.inspect.build import Entry
from multiattn.inspect.cells import HEAD_DIMS, MASKS, Cell, cells
from multiattn.inspect.ncu_child import check_work
from multiattn.inspect.options import count, counts, shape, some_of
from multiattn.inspect.remarks import text_rows, with_sources
from multiattn.inspect.store import ROOT
from multiattn.plan import backend as registry
from multiattn.plan.arch import GPU_ARCHS
from multiattn.plan.backend import BACKENDS, DIRECTIONS, Direction
from multiattn.problem import DTYPES

SCHEMA = 1
VARIANTS = ("offered", "all")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of the command."""

    def chosen(flag: str, allowed: Sequence[str], what: str) -> None:
        command.add_argument(
            flag, action="extend", type=some_of(allowed), metavar="A,B,...", help=f"{what}; default all"
        )

    chosen("--arch", GPU_ARCHS, f"of {', '.join(GPU_ARCHS)}")
    chosen("--backend", BACKENDS, f"of {', '.join(BACKENDS)}")
    chosen("--mask", MASKS, f"of {', '.join(MASKS)}")
    command.add_argument("--direction", choices=(*DIRECTIONS, "both"), default="both", help="default: %(default)s")
    command.add_argument("--head-dim", action="extend", type=counts, metavar="D,...", help="default 64,128,256")
    command.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="default: %(default)s")
    command.add_argument("--variant", help="offered, all, or a name; default the best for each problem")
    command.add_argument("--shape", type=shape, metavar="B,H,S,D", help="of q, if not 16k tokens, H*D=2048, S=4096")
    command.add_argument("--kv-heads", type=count, metavar="H", help="heads of k and v (default: those of q)")
    command.add_argument("--kv-len", type=count, metavar="S", help="length of k and v (default: that of q)")
    command.add_argument("--jobs", type=count, default=os.cpu_count() or 1, help="processes (%(default)s)")
    command.add_argument(
        "--timeout", type=count, default=int(build.TIMEOUT_S), metavar="S", help="for one cell (%(default)s)"
    )
    command.add_argument("--fresh", action="store_true", help="compile also what the cache has")
    command.add_argument("--long", action="store_true", help="print a line for every kernel")
    command.add_argument("--remarks", action="store_true", help="print what cuTile's compiler says of each source line")
    command.add_argument("--json", type=Path, metavar="FILE", help="write all that is known of every kernel")
    command.add_argument(
        "--emit",
        nargs=2,
        metavar=("KINDS", "DIR"),
        help=f"write code for use ahead of time: {','.join(emit.KINDS)}, with a manifest.json",
    )


def run(options: argparse.Namespace) -> int:
    """Compile; 1 where a compiler failed, or of a backend nothing was compiled; 2 for what there cannot be."""
    try:
        wanted = wanted_cells(options)
        if options.emit is None:
            return _compile(wanted, options)
        kinds, folder = _emission(options)
        return emit.run(wanted, kinds, folder, jobs=options.jobs, timeout_s=options.timeout, say=print)
    except ValueError as error:
        print(f"python -m multiattn compile: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted: what was compiled is in the cache", file=sys.stderr)
        return 130


def _compile(wanted: Sequence[Cell], options: argparse.Namespace) -> int:
    """Compile, print and save; ValueError for a file or a cache that cannot be written to."""
    if options.json is not None:
        _try_writing(options.json)
    begin = time.perf_counter()
    made = build.build(wanted, jobs=options.jobs, timeout_s=options.timeout, fresh=options.fresh)
    entries = list(progress(made, len(wanted)))
    print(tables.detailed(entries) if options.long else tables.text_table(entries))
    if options.remarks:
        _print_remarks(entries)
    if options.json is not None:
        save(entries, options.json)
    print(f"\n{_summary(entries)}, {time.perf_counter() - begin:.0f} s")
    idle = idle_backends(entries)
    print("".join(f"{line}\n" for line in idle), end="")
    return int(bool(idle) or any(entry.error for entry in entries))


def wanted_cells(options: argparse.Namespace) -> list[Cell]:
    """The cells that were asked for; ValueError for an unknown variant, or sizes that contradict or need no kernel."""
    head_dims, sizes = options.head_dim or HEAD_DIMS, None
    if options.shape is not None:
        *rest, head_dim = options.shape
        if options.head_dim not in (None, [head_dim]):
            asked = ", ".join(map(str, options.head_dim))
            raise ValueError(f"--head-dim: got {asked} with a shape of D={head_dim}; allowed one of the two")
        sizes, head_dims = tuple(rest), (head_dim,)
    directions = DIRECTIONS if options.direction == "both" else (options.direction,)
    if options.variant not in (None, *VARIANTS):
        _check_variant(options.variant, options.backend or (), directions)
    found = cells(
        options.backend or BACKENDS,
        options.arch or GPU_ARCHS,
        directions=directions,
        head_dims=head_dims,
        masks=options.mask or MASKS,
        variants=(options.variant,),
        dtype=options.dtype,
        shape=sizes,
        kv_heads=options.kv_heads,
        kv_len=options.kv_len,
    )
    if not found:
        raise ValueError(
            f"--variant: got {options.variant!r}, which none of these backends has; allowed {', '.join(VARIANTS)}, or "
            "a name that python -m multiattn explain prints"
        )
    for cell in found:
        check_work(cell.problem)
    return found


def _check_variant(name: str, backends: Sequence[str], directions: Sequence[Direction]) -> None:
    """ValueError where a backend that was asked for by name has no such variant in any of the directions."""
    for backend in map(registry.get, backends):
        its = {variant.name for direction in directions for variant in backend.op(direction).variants}
        if name not in its:
            registry.find_variant(backend, name, directions[0])


def _emission(options: argparse.Namespace) -> tuple[tuple[str, ...], Path]:
    """Kinds and folder; ValueError for options that an emission does nothing with."""
    idle = [name for name in ("json", "long", "remarks") if getattr(options, name)]
    if idle:
        raise ValueError(f"--emit: got it with --{' and --'.join(idle)}; allowed one or the other")
    kinds, folder = options.emit
    return emit.parse_kinds(kinds), Path(folder)


def _try_writing(path: Path) -> None:
    """ValueError where a file cannot be written: said before anything is compiled, not after."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise ValueError(f"--json: cannot write {path}: {error.strerror}") from None


def progress(entries: Iterable[Entry], total: int) -> Iterator[Entry]:
    """Pass entries on with a bar on a terminal, and a line each elsewhere."""
    bar = _bar(total)
    for done, entry in enumerate(entries, 1):
        if bar is not None:
            bar.update()
            bar.set_postfix_str(str(entry.cell))
        elif not entry.cached:
            print(f"[{done}/{total}] {entry.cell}: {entry.text}", flush=True)
        yield entry
    if bar is not None:
        bar.close()


def _bar(total: int) -> Any:
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:  # the report extra is not installed: lines do as well
        return None
    return tqdm(total=total, unit="cell", leave=False)


def idle_backends(entries: Sequence[Entry]) -> list[str]:
    """One line for each backend, in each direction, of which nothing was compiled."""
    lines = []
    for name, direction in dict.fromkeys((entry.cell.backend, entry.cell.direction) for entry in entries):
        mine = [entry for entry in entries if (entry.cell.backend, entry.cell.direction) == (name, direction)]
        if not any(entry.ok for entry in mine):
            why = "; ".join(dict.fromkeys(entry.text for entry in mine))
            lines.append(f"{name} was asked for and nothing of its {direction} compiled: {why}")
    return lines


def _summary(entries: Sequence[Entry]) -> str:
    kernels = sum(len(entry.kernels) for entry in entries)
    counts = {
        "compiled": sum(entry.ok and not entry.cached for entry in entries),
        "from the cache": sum(entry.cached for entry in entries),
        "refused": sum(bool(entry.reasons) for entry in entries),
        "failed": sum(bool(entry.error) for entry in entries),
    }
    said = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f"{len(entries)} cells, {kernels} kernels: {said}"


def _print_remarks(entries: Sequence[Entry]) -> None:
    sources = {path.name: path.read_text() for path in (ROOT / "cutile" / "kernels").glob("*.py")}
    for entry in build.ordered(entries):
        for kernel in entry.kernels:
            if kernel.remarks:
                print(f"\n{entry.cell}, {kernel.name}")
                print(text_rows(with_sources(kernel.remarks, sources)))


def save(entries: Sequence[Entry], path: Path) -> None:
    """Write entries as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"schema": SCHEMA, "entries": [entry.as_dict() for entry in build.ordered(entries)]}
    path.write_text(json.dumps(data, indent=1) + "\n")


def load(path: Path) -> list[Entry]:
    """Entries that `save` wrote; ValueError for another file."""
    what = f"a compile table of schema {SCHEMA} that python -m multiattn compile --json wrote"
    try:
        data = json.loads(path.read_text())
        if data["schema"] != SCHEMA:
            raise ValueError(f"{path}: got schema {data['schema']!r}; allowed {what}")
        return [Entry.from_dict(entry) for entry in data["entries"]]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: got {error!r}; allowed {what}") from None
