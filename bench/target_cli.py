"""``python -m bench expected`` and ``targets``: the record of what compilers make of every target, and its pages."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench import expected, target_docs
from bench.arguments import add_jobs
from bench.environment import ROOT, is_clone, workplace
from bench.errors import InputError
from multiattn.inspect import cli as table
from multiattn.inspect import tables
from multiattn.inspect.build import build
from multiattn.inspect.cells import cells
from multiattn.plan.toolchain import find_cuobjdump

DOCS = "targets.md"


def compile_forward(backends: Sequence[str], jobs: int, path: Path) -> int:
    """The forward of each backend for every target, as a table and as JSON; 1 where a compiler failed."""
    wanted = cells(backends, directions=("forward",), head_dims=(128,), masks=("causal",))
    entries = list(table.progress(build(wanted, jobs=jobs), len(wanted)))
    table.save(entries, path)
    print("\n" + tables.text_table(entries))
    idle = table.idle_backends(entries)
    print("".join(f"{line}\n" for line in idle), end="")
    return int(bool(idle) or any(entry.error for entry in entries))


# ---------------------------------------------------------------- expected


def record_expected(options: argparse.Namespace) -> int:
    """Compile every cell for every target and record what comes of it; with --check only say what got worse."""
    if find_cuobjdump() is None:
        raise InputError("there is no cuobjdump to read cubins with: pip install nvidia-cuda-cuobjdump")
    if not is_clone():
        raise InputError("there is no checkout here to keep a record in; python -m multiattn compile needs none")
    folder = expected.record_folder()
    recorded = expected.load_all(folder)
    older = expected.older_compilers(recorded)
    if older and not options.check:
        raise InputError(f"{older[0]}; to record it all the same, remove {folder.relative_to(workplace())} first")
    wanted = expected.spanning_cells() if options.check and not options.all else expected.all_cells()
    entries = expected.compile_cells(wanted, jobs=options.jobs, say=lambda text: print(text, flush=True))
    findings = expected.check_compiled(wanted, recorded, entries)
    failed = [entry for entry in entries if entry.error]
    print("".join(f"{finding}\n" for finding in findings), end="")
    print("".join(f"{line}: what it makes worse is a note\n" for line in older), end="")
    print("".join(f"failed: {entry.cell}: {entry.error}\n" for entry in failed), end="")
    if options.check:
        wrong = [*_recorded_wrongly(recorded), *(f"{it}" for it in findings if it.kind != "note")]
        print(f"{len(wanted)} cells compiled, {len(wrong) + len(failed)} failures")
        return int(bool(wrong or failed))
    if failed:
        print("Nothing is written: a cell without a result is not expected.")
        return 1
    expected.save(entries, folder)
    (ROOT / "docs" / DOCS).write_text(target_docs.page(expected.load_all(folder)))
    print(f"Written: {folder.relative_to(workplace())}, docs/{DOCS}: {len(entries)} cells, {len(findings)} differ")
    return 0


def _recorded_wrongly(recorded: dict[str, expected.Record]) -> list[str]:
    lines = expected.check_recorded(recorded)
    page = ROOT / "docs" / DOCS
    if not page.exists() or page.read_text() != target_docs.page(recorded):
        lines.append(f"docs/{DOCS} is not what bench/expected gives")
    print("".join(f"{line}; run make expected\n" for line in lines), end="")
    return lines


def add_expected(command: argparse.ArgumentParser) -> None:
    """The options of ``expected``."""
    command.add_argument(
        "--check", action="store_true", help="write nothing; compile a subset that spans it, exit 1 where it got worse"
    )
    command.add_argument("--all", action="store_true", help="with --check: compile every cell")
    add_jobs(command)


# ---------------------------------------------------------------- pages


def write_pages(options: argparse.Namespace) -> int:
    """Write a page per target and one across them, of what is on record: compiled, predicted, measured."""
    from bench import target_pages

    profiles = [target_pages.read_profile(path) for path in options.ncu]
    recorded = expected.load_all(expected.record_folder())
    if not recorded:
        raise InputError("bench/expected has no record: run make expected")
    pages = target_pages.write(recorded, options.out, profiles)
    print(f"Written: {', '.join(map(str, pages))}")
    return 0


def add_pages(command: argparse.ArgumentParser) -> None:
    """The options of ``targets``."""
    command.add_argument("--out", type=Path, default=Path("out") / "targets", help="folder (%(default)s)")
    command.add_argument(
        "--ncu",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a CSV that Nsight Compute wrote, to stand beside what was compiled (python -m multiattn ncu prints how); "
        "may be given again",
    )
