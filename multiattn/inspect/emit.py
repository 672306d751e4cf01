"""``python -m multiattn compile --emit``: kernels compiled here to run elsewhere, in a folder for `multiattn.aot`."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

from multiattn import aot
from multiattn.aot import manifest
from multiattn.bars import Bar
from multiattn.inspect.build import Request, print_idle
from multiattn.inspect.pool import run_isolated
from multiattn.plan import backend as registry
from multiattn.plan.backend import Exported
from multiattn.plan.toolchain import disassemble

KINDS = ("cubin", "ptx", "sass", "tileir", "ttgir")
"""Code that can be asked for: ``cubin`` and ``sass`` of every backend, the others of those whose compiler has them."""


def run(wanted: Sequence[Request], kinds: Sequence[str], folder: Path, *, jobs: int, timeout_s: float) -> int:
    """Compile requests, write their code and a manifest, and print what came of each.

    A cubin is always written. 1 where a compiler failed, or nothing of a backend was written. Before anything is
    compiled: OSError for a folder that cannot be written to, ValueError for one whose manifest cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
    if (folder / manifest.MANIFEST).exists():
        manifest.read(folder)
    export = functools.partial(export_request, kinds=tuple(kinds))
    written, failed = 0, False
    possible = [request for request in wanted if not request.refused]
    made: list[Request] = []
    for request in wanted:
        if reasons := request.refused:
            print(f"{request}: {'; '.join(map(str, reasons))}")
    with Bar(total=len(possible), desc="compiling", unit="plan", disable=None) as bar:  # None: silent in a log
        for outcome in run_isolated(export, possible, jobs=jobs, timeout_s=timeout_s):
            if outcome.result is None:
                failed, told = True, outcome.error
            else:
                *files, _ = aot.write(folder, outcome.item.plan(), outcome.result)
                written += len(files)
                made.append(outcome.item)
                told = ", ".join(path.name for path in files)
            with bar.external_write_mode():
                print(f"{outcome.item}: {told}", flush=True)
            bar.update()
    print(f"Written: {folder}: {written} files, {manifest.MANIFEST}")
    return int(print_idle(wanted, made) or failed)


def export_request(request: Request, *, kinds: Sequence[str]) -> tuple[Exported, ...]:
    """The kernels of a request, with their SASS where it is asked for. The compiler's own exception passes through."""
    kernels = registry.get(request.backend).op(request.direction).export(request.plan(), kinds)
    return tuple(map(_with_sass, kernels)) if "sass" in kinds else kernels


def _with_sass(kernel: Exported) -> Exported:
    code = disassemble(kernel.cubin)
    if code is None:
        raise RuntimeError("there is no cuobjdump to make SASS with: pip install 'multiattn[inspect]'")
    return kernel._replace(texts={**kernel.texts, "sass": code.encode()})
