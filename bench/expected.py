"""bench/expected: what the compilers made of every cell, per target, on record; and what has got worse since."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from bench.environment import workplace
from bench.results import read
from bench.rule_table import compiler, is_older, sources
from multiattn.inspect.build import Entry, build, ordered
from multiattn.inspect.cells import Cell, cells, find_plan
from multiattn.inspect.facts import Facts
from multiattn.inspect.mix import CLASSES, GENERATIONS, Counts, Mix, generations
from multiattn.inspect.remarks import Row as Remarked
from multiattn.inspect.tables import percent
from multiattn.plan.arch import GPU_ARCHS
from multiattn.plan.backend import BACKENDS, DIRECTIONS, Direction
from multiattn.plan.support import Reason, Unsupported

SCHEMA = 1
TIMED = "sm90"
ALWAYS: tuple[tuple[Direction, int, str], ...] = (("forward", 128, "causal"), ("backward", 256, "full"))
"""Direction, head_dim and mask; the rest of the subset is `SPANNING`, with backend and arch in front."""
SPANNING: tuple[tuple[str, str, Direction, int, str], ...] = (
    ("triton", "sm80", "forward", 64, "full"),
    ("cuda", "sm86", "backward", 128, "causal"),
    ("cutile", "sm89", "backward", 64, "full"),
    ("triton", "sm100", "backward", 128, "causal"),
    ("cutile", "sm103", "forward", 128, "full"),
    ("cuda", "sm120", "forward", 64, "full"),
    ("triton", "sm121", "forward", 256, "causal"),
)
"""What a quarter of an hour for all of `make test` leaves time for."""

CompilerAge = Literal["same", "newer", "older"]
"""What a compiler is to that of the record; another one that is not older counts as newer."""
HOT_MOVES = ("UTMALDG", "LDGSTS", "LDSM")
"""Classes of loads that a hot loop must not lose. Of producer warps, which multiply nothing, no loop is hot."""
MOST_MORE_WORK = 2.0
"""By how much a new compiler's instructions beside each matrix multiplication may grow: more, and some are emulated."""
_SHAPE = re.compile(r" \d+(x\d+)+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What is known of one target: an entry per cell, the compilers and the sources that they are of."""

    entries: tuple[Entry, ...]
    compilers: Mapping[str, str]
    """By backend."""
    sources: Mapping[str, str]
    """Digests of what the kernels are made from, by ``backend direction``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One difference between what is on record and what the compilers make now."""

    kind: str
    """``regression``: new spills, occupancy or a tensor-core or TMA instruction lost, or nothing compiled any more;
    ``stale``: the same compiler makes something else; ``note``: another compiler does, or an older one makes it worse.
    """
    cell: Cell
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.cell}: {self.text}"


# ---------------------------------------------------------------- which


def all_cells() -> list[Cell]:
    """The full table: every target, backend, direction, head_dim and mask."""
    return cells()


def spanning_cells() -> list[Cell]:
    """A subset with every target, and of every backend each direction, head_dim, mask and kind of instruction.

    In it is `ALWAYS` of every backend on `TIMED`, whose timings are on record. `make test-all` compiles all cells.
    """
    chosen = {*SPANNING, *((backend, TIMED, *kernel) for backend in BACKENDS for kernel in ALWAYS)}
    return [
        cell for cell in all_cells() if (cell.backend, cell.arch, cell.direction, cell.head_dim, cell.mask) in chosen
    ]


# ---------------------------------------------------------------- compared


def compare(before: Entry, now: Entry, *, compiler: CompilerAge) -> list[Finding]:
    """What differs, what is worse first, by what the compiler is to that on record; an older one's losses are notes."""

    def found(kind: str, texts: Iterable[str]) -> list[Finding]:
        return [Finding(kind=kind, cell=now.cell, text=text) for text in texts]

    if not now.ok:
        lost = [f"no longer compiled: {now.text}"] if before.ok else []
        other = not before.ok and before.text != now.text
        changed = [f"refused otherwise: {before.text} -> {now.text}"] if other else []
        return [*found("regression", lost), *found("stale", changed)]
    if not before.ok:
        return found("stale", [f"compiles now: {before.text}"])
    pairs = _pairs(before.kernels, now.kernels)
    worse = [text for pair in pairs for text in _worse(*pair)]
    differs = _differences(before, now, pairs)
    return [
        *found("note" if compiler == "older" else "regression", worse),
        *found("stale" if compiler == "same" else "note", differs),
    ]


def _pairs(before: Sequence[Facts], now: Sequence[Facts]) -> list[tuple[Facts | None, Facts | None]]:
    """Kernels of one name, then the others in the order of their launch; None where one has no partner."""
    names = {kernel.name for kernel in before} & {kernel.name for kernel in now}
    old, new = ({kernel.name: kernel for kernel in kernels} for kernels in (before, now))
    left, right = ([kernel for kernel in kernels if kernel.name not in names] for kernels in (before, now))
    rest: Iterator[tuple[Facts | None, Facts | None]] = zip_longest(left, right)
    return [*((old[name], new[name]) for name in sorted(names)), *rest]


def _worse(before: Facts | None, now: Facts | None) -> list[str]:
    """What is worse of a kernel, a line each. A new kernel must not spill in its hot loops."""
    if now is None:
        return [f"{before.name} is gone"] if before is not None else []
    if before is None:
        return [f"{now.name}, which is new, spills {now.hot_spills} times in its hot loops"] if now.hot_spills else []
    counted = (
        ("spills in its hot loops", before.hot_spills, now.hot_spills),
        ("spills outside its hot loops", before.other_spills, now.other_spills),
        ("bytes of stack", before.stack_bytes, now.stack_bytes),
    )
    lines = [f"{old} -> {new} {what}" for what, old, new in counted if new > old]
    if now.blocks < before.blocks or now.share < before.share:
        was, is_now = (f"{it.blocks} blocks, {percent(it.share)} of the warps" for it in (before, now))
        lines.append(f"occupancy {was} -> {is_now}, by {now.limiter}")
    if before.hot_loops and not now.hot_loops:
        lines.append("no loop on tensor cores is left")
    lines += [f"{it} is lost" for it in dict.fromkeys(_lost(before, now))]
    work = before.hot.alu_per_tensor, now.hot.alu_per_tensor
    if work[0] and work[1] and work[1] > MOST_MORE_WORK * work[0]:
        lines.append(f"{work[0]:.1f} -> {work[1]:.1f} FP32 and integer instructions for each of the tensor core's")
    return [f"{now.name}: {line}" for line in lines]


def _lost(before: Facts, now: Facts) -> list[str]:
    """Ways to multiply and to move data that a kernel had, in all of its code or in its hot loops."""
    lost = [it for it in before.features if it not in now.features and it not in GENERATIONS.values()]
    lost += _older(before.mix.code, now.mix.code)
    lost += [f"{it} in its hot loops" for it in _older(before.hot, now.hot) if it not in lost]
    moved = [name for name in HOT_MOVES if before.hot[name] and not now.hot[name]]
    lost += [f"{name} in its hot loops" for name in moved]
    return lost + [it for it in _chosen(before) if it not in _chosen(now)]


def _older(before: Counts, now: Counts) -> list[str]:
    """The newest generation of tensor core that code used, where what it uses now is older or none.

    Only the newest counts: a rare pass may use an older one than the hot loops, and may change it.
    """
    newest, left = (max(generations(counts), default=-1) for counts in (before, now))
    return [GENERATIONS[newest]] if left < newest else []


def _chosen(kernel: Facts) -> list[str]:
    """What cuTile's compiler chose, whatever the shape."""
    return list(dict.fromkeys(_SHAPE.sub("", it) for it in kernel.chosen))


def _differences(before: Entry, now: Entry, pairs: Sequence[tuple[Facts | None, Facts | None]]) -> list[str]:
    """Fields that differ, in one line; nothing where all is the same."""
    changed = [
        f"{name} {old} -> {new}"
        for name, old, new in (("variant", before.variant, now.variant), ("config", before.config, now.config))
        if old != new
    ]
    for old, new in pairs:
        if old is None or new is None:
            changed.append(f"{new.name} is new" if new is not None else f"{old.name if old else ''} is gone")
        else:
            changed += [f"{new.name} {text}" for text in _changed(old, new)]
    return ["; ".join(changed)] if changed else []


def _changed(before: Facts, now: Facts) -> Iterator[str]:
    old, new = pack(before), pack(now)
    for name in old:
        if old[name] == new[name]:
            continue
        if name in ("hot", "code"):
            counts = (before.hot, now.hot) if name == "hot" else (before.mix.code, now.mix.code)
            different = [it for it in CLASSES if counts[0][it] != counts[1][it]]
            yield f"{name}: " + ", ".join(f"{it} {counts[0][it]} -> {counts[1][it]}" for it in different)
        elif name in ("loops", "remarks"):
            yield f"{name} differ"
        else:
            yield f"{name} {old[name]} -> {new[name]}"


# ---------------------------------------------------------------- checked


def check_recorded(recorded: Mapping[str, Record]) -> list[str]:
    """What is wrong with the record as far as can be told without compiling, a line each."""
    lines = [f"{arch}: not on record" for arch in GPU_ARCHS if arch not in recorded]
    known = {entry.cell: entry for record in recorded.values() for entry in record.entries}
    wanted = all_cells()
    lines += [f"not on record: {cell}" for cell in wanted if cell not in known and cell.arch in recorded]
    lines += [f"on record, but not in the table: {cell}" for cell in known if cell not in set(wanted)]
    lines += [line for cell in wanted if cell in known for line in _planned_otherwise(cell, known[cell])]
    for arch, record in recorded.items():
        stale = [name for name, digest in current_sources().items() if record.sources.get(name) != digest]
        if stale:
            lines.append(f"{arch}: of other sources: {', '.join(stale)}")
    return lines


def _planned_otherwise(cell: Cell, entry: Entry) -> list[str]:
    """Where the data that decides a cell's plan is no longer what it was recorded by."""
    plan = find_plan(cell)
    if isinstance(plan, Unsupported):
        same = entry.reasons == plan.reasons
        return [] if same else [f"recorded as {_recorded_as(entry)}, but refused: {cell}"]
    same = entry.ok and (entry.variant, entry.config) == (plan.variant, str(plan.config))
    return [] if same else [f"recorded as {_recorded_as(entry)}, but planned as {plan.variant} {plan.config}: {cell}"]


def _recorded_as(entry: Entry) -> str:
    return f"{entry.variant} {entry.config}" if entry.ok else entry.text


def check_compiled(wanted: Sequence[Cell], recorded: Mapping[str, Record], made: Iterable[Entry]) -> list[Finding]:
    """What differs from the record in entries that were compiled now; a cell of which nothing came is a regression."""
    known = {entry.cell: entry for record in recorded.values() for entry in record.entries}
    here = current_compilers()
    entries = list(made)
    missing = [cell for cell in wanted if cell not in {entry.cell for entry in entries}]
    findings = [Finding(kind="regression", cell=cell, text="nothing came of it") for cell in missing]
    for entry in entries:
        before = known.get(entry.cell)
        if before is not None:
            ours, theirs = here[entry.cell.backend], recorded[entry.cell.arch].compilers.get(entry.cell.backend, "")
            age: CompilerAge = "same" if ours == theirs else "older" if is_older(ours, than=theirs) else "newer"
            findings += compare(before, entry, compiler=age)
    return findings


def compile_cells(wanted: Sequence[Cell], *, jobs: int, say: Callable[[str], None]) -> list[Entry]:
    """Compile them, or take them from the cache, and say each that was not."""
    entries = []
    for done, entry in enumerate(build(wanted, jobs=jobs), 1):
        if not entry.cached:
            say(f"[{done}/{len(wanted)}] {entry.cell}: {entry.text}")
        entries.append(entry)
    return entries


# ---------------------------------------------------------------- kept


def record_folder() -> Path:
    """Where the record is, and is committed: a file per target."""
    return workplace() / "bench" / "expected"


def current_sources() -> dict[str, str]:
    """What a record of now would say of its sources."""
    return {f"{name} {direction}": sources(name, direction)[:12] for name in BACKENDS for direction in DIRECTIONS}


def current_compilers() -> dict[str, str]:
    """What a record of now would say of its compilers."""
    return {name: compiler(name) for name in BACKENDS}


def older_compilers(recorded: Mapping[str, Record]) -> list[str]:
    """A line for each backend whose compiler here is older than one that a record is of."""
    here = current_compilers()
    pairs = {(here[name], it) for record in recorded.values() for name, it in record.compilers.items() if name in here}
    return [
        f"{ours} is older than {theirs} of the record" for ours, theirs in sorted(pairs) if is_older(ours, than=theirs)
    ]


def save(entries: Sequence[Entry], folder: Path) -> None:
    """Write a file per target, one line per kernel; what varies from run to run is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {}
    for arch in dict.fromkeys(entry.cell.arch for entry in ordered(entries)):
        mine = [entry for entry in ordered(entries) if entry.cell.arch == arch]
        head = {
            "schema": SCHEMA,
            "arch": arch,
            "compilers": current_compilers(),
            "sources": current_sources(),
            "classes": CLASSES,
        }
        text = json.dumps(head, indent=1).removesuffix("\n}") + ',\n "entries": [\n'
        texts[arch] = text + ",\n".join(map(_lines, mine)) + "\n ]\n}\n"
    for arch, text in texts.items():  # all of them are whole before the first is replaced
        draft = folder / f"{arch}.json.new"
        draft.write_text(text)
        draft.replace(folder / f"{arch}.json")


def _lines(entry: Entry) -> str:
    """An entry as JSON: a line for itself and one for each kernel."""
    data = {it.name: getattr(entry, it.name) for it in fields(entry) if it.name not in ("kernels", "cached")}
    data |= {"cell": asdict(entry.cell), "reasons": [asdict(reason) for reason in entry.reasons]}
    kernels = ",\n   ".join(json.dumps(pack(kernel)) for kernel in entry.kernels)
    return f'  {json.dumps(data)[:-1]}, "kernels": [\n   {kernels}]}}'


def pack(kernel: Facts) -> dict[str, Any]:
    """A kernel as short plain data, without what varies: the compiler's seconds, the length of the ELF file."""
    plain = {it.name: getattr(kernel, it.name) for it in fields(kernel) if it.name not in ("kernel", "mix", "remarks")}
    del plain["seconds"], plain["cubin_bytes"]
    return {
        "kernel": kernel.name,
        **plain,
        "code_bytes": kernel.mix.code_bytes,
        "loops": [_pack_counts(loop) for loop in kernel.mix.loops],
        "hot": _pack_counts(kernel.mix.hot),
        "code": _pack_counts(kernel.mix.code),
        "chosen": list(kernel.chosen),
        "remarks": [[row.file, row.line, row.what, row.count, row.failed] for row in kernel.remarks],
    }


def unpack(data: Mapping[str, Any]) -> Facts:
    """The kernel that `pack` was given, as far as it goes."""
    rest = dict(data)
    code_bytes, loops, hot, code = (rest.pop(name) for name in ("code_bytes", "loops", "hot", "code"))
    remarks = tuple(
        Remarked(file=file, line=line, what=what, count=count, failed=failed)
        for file, line, what, count, failed in rest.pop("remarks")
    )
    counted = Mix(
        code=_unpack_counts(code),
        hot=_unpack_counts(hot),
        loops=tuple(map(_unpack_counts, loops)),
        code_bytes=code_bytes,
    )
    chosen = tuple(rest.pop("chosen"))
    return Facts(**rest, cubin_bytes=0, seconds=0.0, mix=counted, remarks=remarks, chosen=chosen)


def _pack_counts(counts: Counts) -> list[Any]:
    """Instructions in the order of CLASSES, those of tensor cores and those that nobody knows by name."""
    return [[counts[name] for name in CLASSES], dict(counts.tensor_names), dict(counts.unknown)]


def _unpack_counts(data: Sequence[Any]) -> Counts:
    numbers, tensor_names, unknown = data
    found = {name: number for name, number in zip(CLASSES, numbers, strict=True) if number}
    return Counts(classes=dict(sorted(found.items())), tensor_names=tensor_names, unknown=unknown)


def load(path: Path) -> Record:
    """The record of one target that `save` wrote; InputError for another file."""

    def record(data: dict[str, Any]) -> Record:
        if tuple(data["classes"]) != CLASSES:
            raise ValueError(f"{path}: of other classes of instructions; run make expected")
        entries = tuple(_entry(entry) for entry in data["entries"])
        return Record(entries=entries, compilers=data["compilers"], sources=data["sources"])

    return read(path, f"a record of schema {SCHEMA} that make expected wrote", SCHEMA, record)


def _entry(data: Mapping[str, Any]) -> Entry:
    given = {
        "cell": Cell.from_dict(data["cell"]),
        "kernels": tuple(map(unpack, data["kernels"])),
        "reasons": tuple(Reason(**reason) for reason in data["reasons"]),
    }
    return Entry(**{**data, **given})


def load_all(folder: Path) -> dict[str, Record]:
    """The record of every target that there is one of, by name."""
    found = {arch: folder / f"{arch}.json" for arch in GPU_ARCHS}
    return {arch: load(path) for arch, path in found.items() if path.exists()}
