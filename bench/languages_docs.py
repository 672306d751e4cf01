"""docs/languages.md: its tables, made of the sources and of what is on record. ``python -m bench readme`` writes them.

A column is a language, so where a results file names a backend, the variant of the row's Plan says which language ran.
Whatever is not on record is a dash, so that a page can be made before everything is measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from bench import expected, host, readme, rule_table, source_lines
from bench.environment import ROOT
from bench.hopper_docs import GPU_FOLDER, PEERS, geometric_mean, table
from bench.languages import LANGUAGES, NO_TURNS, REGIME, Language, Turns, language_of, rate, turns
from bench.matrix import SUITES, Cell
from bench.report import describe, figure, provenance
from bench.results import Row, load
from multiattn import backend as registry
from multiattn.arch import ARCHS, GPU_ARCHS
from multiattn.backend import DIRECTIONS, Direction
from multiattn.targets.cells import Cell as Target
from multiattn.targets.mix import FEATURES

PAGE = ROOT / "docs" / "languages.md"
NOTHING = "-"
ARCH, HEAD_DIM, MASK = "sm90", 128, "causal"
"""Of the kernels whose registers are told; of the last two also what a compiler uses on each arch."""
PLAIN_PAIR = ("triton/full", "flex")
"""Plain Triton, and what the same language does for PyTorch."""
TITLES = tuple(language.title for language in LANGUAGES)


def blocks(results: Path) -> Mapping[str, Callable[[], str]]:
    """What generates each block of the page; bench/expected lies beside `results`."""
    gpu = results / GPU_FOLDER
    rules = results / "compiled" / "rules.json"
    return {
        "lines": lines_block,
        "forward": lambda: ratios_block(gpu / "standard.json", SUITES["standard"]),
        "forward_by_length": lambda: lengths_block(gpu / "standard.json", SUITES["standard"]),
        "plain_triton": lambda: plain_triton_block(gpu / "standard.json", SUITES["standard"]),
        "backward": lambda: ratios_block(gpu / "backward.json", SUITES["backward"]),
        "backward_by_length": lambda: lengths_block(gpu / "backward.json", SUITES["backward"]),
        "host": lambda: host_block(gpu / "host.json"),
        "head_dims": head_dims_block,
        "machinery": lambda: machinery_block(results.parent / "expected"),
        "registers": lambda: registers_block(rules),
    }


def update(results: Path, *, check: bool) -> bool:
    """Whether the page was current; unless `check`, it is afterwards."""
    return readme.update_page(PAGE, blocks(results), check=check)


def _absent(path: Path) -> str:
    return f"Not on record yet: `bench/results/{'/'.join(path.parts[-2:])}` is not there."


# ---------------------------------------------------------------- lines


def lines_block() -> str:
    """Lines by language and direction, and below the files that were counted."""
    counts = source_lines.count(source_lines.parts())
    rows = [(it.part.language, it.part.what, it.own, it.shared or NOTHING) for it in counts]
    files = [f"- {it.part.language}, {it.part.what}: {_listed(it.part.files)}" for it in counts]
    told = table(("language", "kernels", "lines of their own", "lines shared with the other kernels"), rows)
    return "\n\n".join([told, "Files, in `multiattn/`:", "\n".join(files)])


def _listed(files: Sequence[str]) -> str:
    """By folder, which is told once."""
    parts = []
    for folder, members in groupby(sorted(files), lambda name: name.rpartition("/")[0]):
        names = [f"`{name.rpartition('/')[2]}`" for name in members]
        parts.append(f"in `{folder}/` {', '.join(names)}")
    return "; ".join(parts)


# ---------------------------------------------------------------- speed


def _place(cell: Cell) -> tuple[int, bool, int]:
    return cell.head_dim, cell.causal, cell.seq


def ratios_block(path: Path, cells: Sequence[Cell]) -> str:
    """By head_dim and mask: the geometric mean over lengths of TFLOPS over the fastest peer's, a column a language."""
    found = turns(path, cells)
    rows = []
    for (head_dim, mask), members in groupby(sorted(cells, key=_place), lambda cell: (cell.head_dim, cell.mask)):
        mine = [found.get(cell, NO_TURNS) for cell in members]
        rows.append((head_dim, mask, *(_mean(mine, title) for title in TITLES)))
    every = [found.get(cell, NO_TURNS) for cell in cells]
    rows.append(("all", "", *(_mean(every, title) for title in TITLES)))
    told = [_fastest(found.values()), _ran(found.values())] if path.exists() else [_absent(path)]
    return "\n\n".join([table(("D", "mask", *TITLES), rows), *told])


def _mean(members: Sequence[Turns], title: str) -> str:
    """With how many cells it is of, where some have no ratio."""
    ratios = [ratio for it in members if (ratio := it.ratio(title)) is not None]
    mean = geometric_mean(ratios)
    if mean is None:
        return NOTHING
    return f"{mean:.2f}" if len(ratios) == len(members) else f"{mean:.2f} ({len(ratios)} of {len(members)} cells)"


def lengths_block(path: Path, cells: Sequence[Cell]) -> str:
    """TFLOPS of each language and peer in every cell."""
    found = turns(path, cells)
    rows = []
    for cell in sorted(cells, key=_place):
        its = found.get(cell, NO_TURNS)
        members = [*(its.ours.get(title) for title in TITLES), *(its.peers.get(name) for name in PEERS)]
        shown = (NOTHING if row is None else figure(row) for row in members)
        rows.append((cell.head_dim, cell.mask, cell.seq, *shown))
    measured = [row for it in found.values() for row in (*it.ours.values(), *it.peers.values()) if row.measured]
    told = "\n".join(provenance(measured)) if path.exists() else _absent(path)
    return "\n\n".join(filter(None, [table(("D", "mask", "N", *TITLES, *PEERS), rows), told]))


def plain_triton_block(path: Path, cells: Sequence[Cell]) -> str:
    """TFLOPS of plain Triton over FlexAttention's, where one run has both: a line a head_dim and mask, by length."""
    wanted = set(cells)
    timed: dict[tuple[Cell, str], dict[str, Row]] = {}
    for row in load(path) if path.exists() else []:
        if row.regime == REGIME and row.cell in wanted and row.contender in PLAIN_PAIR and row.measured is not None:
            timed.setdefault((row.cell, row.run), {})[row.contender] = row
    pairs = {cell: [rows[name] for name in PLAIN_PAIR] for (cell, _), rows in timed.items() if len(rows) == 2}
    ratios = {cell: rate(ours) / rate(theirs) for cell, (ours, theirs) in pairs.items()}
    seqs = sorted({cell.seq for cell in cells})
    rows = []
    for (head_dim, mask), members in groupby(sorted(cells, key=_place), lambda cell: (cell.head_dim, cell.mask)):
        by_seq = {cell.seq: ratios[cell] for cell in members if cell in ratios}
        rows.append((head_dim, mask, *(f"{by_seq[seq]:.2f}" if seq in by_seq else NOTHING for seq in seqs)))
    told = table(("D", "mask", *map(str, seqs)), rows)
    if not ratios:
        return "\n\n".join(filter(None, [told, "" if path.exists() else _absent(path)]))
    mean, least = geometric_mean(list(ratios.values())), min(ratios.values())
    source = "\n".join(provenance([row for pair in pairs.values() for row in pair]))
    return "\n\n".join([told, f"Of {len(ratios)} cells: geometric mean {mean:.2f}, least {least:.2f}.", source])


def _fastest(found: Iterable[Turns]) -> str:
    """In how many cells each language was the fastest of those that were timed together."""
    rated = [{title: rate(row) for title, row in it.ours.items() if row.measured is not None} for it in found]
    winners = Counter(max(rates, key=lambda title: rates[title]) for rates in rated if rates)
    told = ", ".join(f"{title} in {winners[title]}" for title in TITLES if winners[title])
    return f"The fastest of the languages, of {sum(winners.values())} cells: {told or NOTHING}."


def _ran(found: Iterable[Turns]) -> str:
    """Which variants a language's rows are of, and how many of each, by their Plans."""
    counted: dict[str, Counter[str]] = {}
    for its in found:
        for title, row in its.ours.items():
            if row.measured is not None and row.plan is not None:
                counted.setdefault(title, Counter())[row.plan["variant"]] += 1
    told = [
        f"{title} {', '.join(f'`{name}` ({times})' for name, times in sorted(counted[title].items()))}"
        for title in TITLES
        if title in counted
    ]
    return f"Variants that ran, and in how many cells each was the language's fastest: {'; '.join(told) or NOTHING}."


# ---------------------------------------------------------------- host


def host_block(path: Path) -> str:
    """Microseconds of each kind of call by language, and of SDPA."""
    setup, costs = host.load(path) if path.exists() else (None, [])
    found: dict[str, dict[str, str]] = {title: {} for title in TITLES}
    for cost in costs:
        found.setdefault(_title(cost), {})[cost.kind] = cost.text
    rows = [(title, *(kinds.get(kind, NOTHING) for kind in host.KINDS)) for title, kinds in found.items()]
    told = table(("language", *(f"{kind} [us]" for kind in host.KINDS)), rows)
    if setup is None:
        return f"{told}\n\n{_absent(path)}"
    return f"{told}\n\n{host.measured_cell(path).key}. {describe(setup)}"


def _title(cost: host.HostCost) -> str:
    """The language of a cost, where the file says it or the backend has only one; else the contender."""
    mine = [it for it in LANGUAGES if it.backend == cost.contender]
    if cost.variant:
        mine = [it for it in mine if it.has(cost.contender, cost.variant)]
    if len(mine) == 1:
        return mine[0].title
    return f"{cost.contender}, in which of its languages is not on record" if mine else cost.contender


# ---------------------------------------------------------------- where


def head_dims_block() -> str:
    """The head_dims that a language's variants take on each arch, by the data alone; the CPU is one of them."""
    arches = ("cpu", *GPU_ARCHS)
    rows = [
        (language.title, direction, *(_head_dims(language, direction, arch) for arch in arches))
        for language in LANGUAGES
        for direction in DIRECTIONS
    ]
    return table(("language", "direction", *arches), rows)


def _head_dims(language: Language, direction: Direction, arch: str) -> str:
    backend = registry.get(language.backend)
    able: set[int] = set()
    for variant in language.offered(direction):
        if arch in variant.capability.arches:
            able |= set(readme.supported_head_dims(backend, variant, ARCHS[arch], direction)[0])
    return readme.ranges(sorted(able)) or NOTHING


def machinery_block(folder: Path) -> str:
    """What the code that each compiler makes multiplies and loads with, by arch; of one head_dim and mask."""
    found: dict[tuple[Language | None, str, str], tuple[str, ...]] = {}
    records = expected.load_all(folder)
    for entry in (entry for record in records.values() for entry in record.entries):
        cell = entry.cell
        if entry.ok and (cell.head_dim, cell.mask) == (HEAD_DIM, MASK):
            found[language_of(cell.backend, entry.variant), cell.direction, cell.arch] = entry.main.features
    rows = []
    for language in LANGUAGES:
        for direction in DIRECTIONS:
            used: dict[tuple[str, ...], list[str]] = {}
            for arch in GPU_ARCHS:
                used.setdefault(found.get((language, direction, arch), ()), []).append(arch)
            rows += [(language.title, direction, ", ".join(arches), _features(names)) for names, arches in used.items()]
    compilers = dict.fromkeys(name for record in records.values() for name in record.compilers.values())
    told = f"D={HEAD_DIM} {MASK}. Compilers: {'; '.join(compilers) or NOTHING}."
    return "\n\n".join([table(("language", "direction", "arches", "uses"), rows), told])


def _features(names: Sequence[str]) -> str:
    return ", ".join(name for name in FEATURES if name in names) or NOTHING


def registers_block(path: Path) -> str:
    """Registers, spills, shared memory and occupancy of the kernels of one problem."""
    recorded = rule_table.load(path) if path.exists() else []
    rows: list[tuple[object, ...]] = []
    compilers: dict[str, None] = {}
    for language in LANGUAGES:
        for direction in DIRECTIONS:
            kernels = _kernels(language, direction, recorded)
            compilers |= dict.fromkeys(it.compiler for it in kernels)
            rows += [
                (
                    *(language.title, direction, f"`{it.kernel}`", it.threads, it.registers),
                    *(f"{it.hot_spills} + {it.other_spills}", it.smem_bytes, f"{it.blocks} ({it.limiter})"),
                )
                for it in kernels
            ] or [(language.title, direction, *[NOTHING] * 6)]
    headers = ("language", "direction", "kernel", "threads", "registers", "spills", "smem [B]", "blocks an SM")
    told = f"D={HEAD_DIM} {MASK} on {ARCH}. Compilers: {'; '.join(compilers) or NOTHING}."
    return "\n\n".join([table(headers, rows), told if path.exists() else _absent(path)])


def _kernels(language: Language, direction: Direction, recorded: Sequence[rule_table.Row]) -> list[rule_table.Row]:
    """Those on record of what the language runs; none where the record is of other rules."""
    problem = Target(backend=language.backend, arch=ARCH, head_dim=HEAD_DIM, mask=MASK).problem
    plan = language.plan(problem, ARCH, direction)
    if plan is None:
        return []
    key = (plan.backend, direction, plan.variant, ARCH, str(HEAD_DIM), MASK, str(plan.config))
    return [row for row in recorded if row.key == key]
