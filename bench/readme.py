"""The generated tables of README.md: what each backend supports, what was measured, what a call costs the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tabulate import tabulate

from bench import backward, host
from bench.matrix import Direction
from bench.report import figure, provenance
from bench.results import Row, load, one_run
from multiattn.plan import backend as registry
from multiattn.plan.arch import ARCHS, GPU_ARCHS, Arch
from multiattn.plan.backend import BACKENDS, DIRECTIONS, Backend, Variant, plan_variant
from multiattn.plan.support import Reason
from multiattn.problem import Problem

HEAD_DIM_STEP = 8

NOTHING_MEASURED = "Nothing is recorded yet: `python -m bench` on a GPU writes bench/results."
SHOWN_SEQS = (1024, 4096, 16384)


def support_block() -> str:
    """Per backend and offered variant: the head_dims that run on each arch, by the data alone; or why none does.

    Below, a line for each backend and direction that has more rungs than those.
    """
    rows = [
        (
            backend.name,
            direction,
            variant.name,
            ", ".join(variant.capability.dtypes),
            *(_supported(backend, variant, arch, direction) for arch in GPU_ARCHS),
        )
        for backend in map(registry.get, BACKENDS)
        for direction in DIRECTIONS
        for variant in backend.op(direction).offered
    ]
    headers = ("backend", "direction", "variant", "dtypes", *GPU_ARCHS)
    table = tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)
    parts = [table, "A range is of head_dims, in multiples of 8; a word says what refuses the rest."]
    return "\n\n".join([*parts, *filter(None, ["\n".join(_more_rungs())])])


def _more_rungs() -> list[str]:
    """How many variants must be asked for by name, of each backend and direction that has some."""
    lines = []
    for backend in map(registry.get, BACKENDS):
        for direction in DIRECTIONS:
            if more := sum(variant.only_named for variant in backend.op(direction).variants):
                rungs = f"{more} more rung{'s' if more > 1 else ''}, selected only by name"
                lines.append(f"- {backend.name} {direction} has {rungs}: [docs/ladder.md](docs/ladder.md)")
    return lines


def _supported(backend: Backend, variant: Variant, arch: str, direction: registry.Direction) -> str:
    able, codes = supported_head_dims(backend, variant, ARCHS[arch], direction)
    return ranges(able) or "no: " + ", ".join(dict.fromkeys(codes))


def supported_head_dims(
    backend: Backend, variant: Variant, arch: Arch, direction: registry.Direction
) -> tuple[list[int], list[str]]:
    """The multiples of 8 that a variant takes on an arch, by the data alone, and the codes of what refuses others."""
    able, codes = [], []
    for head_dim in range(HEAD_DIM_STEP, variant.capability.head_dim_max + 1, HEAD_DIM_STEP):
        problem = Problem.contiguous(batch=4, heads_q=16, seq_q=4096, head_dim=head_dim)
        plan = plan_variant(backend, variant, problem, arch, direction=direction)
        if isinstance(plan, tuple):
            codes += [reason.code for reason in plan if isinstance(reason, Reason)]
        else:
            able.append(head_dim)
    return able, codes


def ranges(head_dims: Sequence[int]) -> str:
    """``8-128, 192``: runs of neighbouring multiples of 8."""
    runs: list[list[int]] = []
    for head_dim in head_dims:
        if runs and head_dim == runs[-1][-1] + 8:
            runs[-1].append(head_dim)
        else:
            runs.append([head_dim])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def results_block(results: Path) -> str:
    """Per GPU: a table of the suite `standard` at three lengths, one of `backward`, the cost of a call; from files."""
    parts = []
    for folder in sorted(path for path in results.glob("*") if path.is_dir()):
        standard, training, call = (folder / f"{name}.json" for name in ("standard", "backward", "host"))
        if standard.exists():
            parts.append(_results_table(load(standard), "fwd"))
        if training.exists():
            rows = load(training)
            parts.append(_results_table(rows, "bwd"))
            parts += filter(None, [backward.memory_summary(rows)])
        if call.exists():
            setup, costs = host.load(call)
            where = f"{setup.gpu}, {host.measured_cell(call).key}"
            parts += [f"Host cost of one warm call, {where}:", host.table(costs, form="github")]
    return "\n\n".join(parts) or NOTHING_MEASURED


def _results_table(rows: Sequence[Row], direction: Direction) -> str:
    """TFLOPS of one direction; of forward only the best variant of each backend, of backward also the deterministic."""
    chosen = [
        row
        for row in one_run(rows)
        if row.regime == "device"
        and row.cell.seq in SHOWN_SEQS
        and row.cell.direction == direction
        and (direction != "fwd" or "/" not in row.contender)
    ]
    measured = [row for row in chosen if row.measured is not None]
    if not measured:
        return NOTHING_MEASURED
    names = [
        name for name in dict.fromkeys(row.contender for row in chosen) if any(r.contender == name for r in measured)
    ]
    found = {(row.cell.key, row.contender): row for row in chosen}
    cells = sorted({row.cell for row in chosen}, key=lambda cell: (cell.head_dim, cell.causal, cell.seq))
    table = [
        (cell.head_dim, cell.mask, cell.seq, *(figure(found.get((cell.key, name))) for name in names)) for cell in cells
    ]
    text = tabulate(table, headers=("D", "mask", "N", *names), tablefmt="github", disable_numparse=True)
    what = {"fwd": "forward", "bwd": "backward", "fwdbwd": "forward and backward"}[direction]
    return f"TFLOPS, {what}, 16k tokens, H*D = 2048, back to back:\n\n{text}\n\n" + "\n".join(provenance(measured))


def blocks(results: Path) -> dict[str, Callable[[], str]]:
    """What makes each table."""
    return {"support": support_block, "results": lambda: results_block(results)}
