"""``python -m multiattn compile --emit``: kernels compiled here to run elsewhere, in a folder for `multiattn.aot`."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from multiattn import aot
from multiattn.inspect.cells import Cell, find_plan
from multiattn.inspect.pool import run_isolated
from multiattn.plan import backend as registry
from multiattn.plan.backend import Exported
from multiattn.plan.support import Reason, Unsupported
from multiattn.plan.toolchain import disassemble

KINDS = ("cubin", "ptx", "sass", "tileir", "ttgir")
"""Code that can be asked for: ``cubin`` and ``sass`` of every backend, the others of those whose compiler has them."""


def parse_kinds(text: str) -> tuple[str, ...]:
    """Some of `KINDS`, with commas between them; ValueError for others."""
    kinds = tuple(dict.fromkeys(text.split(",")))
    wrong = [kind for kind in kinds if kind not in KINDS]
    if wrong:
        raise ValueError(f"--emit: got {', '.join(wrong)}; allowed {', '.join(KINDS)}")
    return kinds


def run(
    wanted: Sequence[Cell],
    kinds: Sequence[str],
    folder: Path,
    *,
    jobs: int,
    timeout_s: float,
    say: Callable[[str], None],
) -> int:
    """Compile cells afresh, write their code and a manifest, and say of each what came of it.

    A cubin is always written. 1 where a compiler failed, or of a backend nothing was written; ValueError for a folder
    that cannot be written to, or whose manifest cannot be read, before anything is compiled.
    """
    _try_folder(folder)
    refused: dict[Cell, tuple[Reason, ...]] = {}
    for cell in wanted:
        plan = find_plan(cell)
        if isinstance(plan, Unsupported):
            refused[cell] = plan.reasons
        elif lacking := registry.get(cell.backend).probe_compiler():
            refused[cell] = lacking
    possible = [cell for cell in wanted if cell not in refused]
    for cell, reasons in refused.items():
        say(f"{cell}: {'; '.join(map(str, reasons))}")
    written, failed, whose = 0, 0, set()
    export = functools.partial(export_cell, kinds=tuple(kinds))
    for done, outcome in enumerate(run_isolated(export, possible, jobs=jobs, timeout_s=timeout_s), 1):
        head = f"[{done}/{len(possible)}] {outcome.item}"
        if outcome.result is None:
            failed += 1
            say(f"{head}: {outcome.error}")
            continue
        kernels, texts = outcome.result
        files = aot.write(folder, outcome.item.plan(), kernels, texts=texts)
        written += len(files) - 1  # the manifest is written again each time
        whose.add(outcome.item.backend)
        say(f"{head}: {', '.join(path.name for path in files[:-1])}{_absent(kernels, kinds)}")
    idle = dict.fromkeys(cell.backend for cell in wanted if cell.backend not in whose)
    for name in idle:
        say(f"{name} was asked for and nothing of it was written")
    if written:
        say(f"Written: {folder}: {written} files of {len(possible) - failed} cells, {aot.MANIFEST}")
    return int(failed > 0 or bool(idle))


def _try_folder(folder: Path) -> None:
    """ValueError where nothing can be added to a folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"--emit: cannot write to {folder}: {error.strerror}") from None
    if (folder / aot.MANIFEST).exists():
        aot.entries(folder)


def export_cell(cell: Cell, *, kinds: Sequence[str]) -> tuple[tuple[Exported, ...], Mapping[str, Mapping[str, bytes]]]:
    """The kernels of a cell, and their SASS where it is asked for. The compiler's own exception passes through."""
    plan = cell.plan()
    kernels = registry.get(cell.backend).op(cell.direction).export(plan, kinds)
    if "sass" not in kinds:
        return kernels, {}
    texts = {}
    for kernel in kernels:
        code = disassemble(kernel.cubin)
        if code is None:
            raise RuntimeError("there is no cuobjdump to make SASS with: pip install nvidia-cuda-cuobjdump")
        texts[kernel.kernel] = {"sass": code.encode()}
    return kernels, texts


def _absent(kernels: Sequence[Exported], kinds: Sequence[str]) -> str:
    """What was asked for and this backend's compiler does not have."""
    absent = [kind for kind in kinds if kind not in ("cubin", "sass") and not any(kind in it.texts for it in kernels)]
    return f" (it has no {', '.join(absent)})" if absent else ""
