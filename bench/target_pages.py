"""``python -m bench targets``: a page of HTML per target and one across them, made from what is on record alone.

What they show is `bench.target_views`; how, the templates beside this file. Same record and results, same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from bench import target_docs, target_profiles, target_views
from bench.environment import ROOT
from bench.errors import InputError
from bench.expected import Record, current_sources
from bench.report import commands, provenance
from bench.results import Row as Result
from bench.results import is_ours, load
from bench.target_profiles import Profile, Profiled
from bench.target_views import MAPS, Ceiling, Heat, Line, Note, Row
from multiattn.inspect import ncu, remarks
from multiattn.inspect.build import Entry
from multiattn.inspect.cells import SEQ, Cell
from multiattn.inspect.facts import Facts
from multiattn.inspect.roofline import HIDDEN, TOKENS, Measurement
from multiattn.plan.arch import ARCHS, GPU_ARCHS, GPUS, Gpu, find_gpu
from multiattn.plan.backend import BACKENDS, DIRECTIONS, Direction

INDEX = "index.html"


def write(recorded: Mapping[str, Record], out: Path, profiles: Sequence[Profile] = ()) -> Sequence[Path]:
    """Write index.html and a page per target into `out`; their paths.

    InputError for results that are none, and for profiles of a GPU without a page.
    """
    measurements, origins = target_docs.measured(), _origins(target_docs.result_files())
    profiled = target_profiles.profiled(recorded, profiles)
    environment = _environment()
    found = {direction: target_views.rows(recorded, direction) for direction in DIRECTIONS}
    texts = {INDEX: environment.get_template("targets.html").render(_index(recorded, found, measurements, origins))}
    for arch in GPU_ARCHS:
        target = _target(arch, recorded.get(arch), found, measurements, origins, profiled[arch])
        texts[target_views.page_of(arch)] = environment.get_template("target.html").render(target)
    out.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (out / name).write_text(text)
    return [out / name for name in texts]


def read_profile(path: Path) -> Profile:
    """A CSV that ncu wrote; InputError, which names it, for another file."""
    try:
        return Profile(name=path.name, launches=tuple(ncu.read_file(path)))
    except ncu.ProfilerError as error:
        raise InputError(f"--ncu: {error}") from None


def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.globals.update(
        archs={name: ARCHS[name] for name in GPU_ARCHS},
        anchor=target_views.anchor,
        device_anchor=device_anchor,
        hidden=HIDDEN,
        page_of=target_views.page_of,
        seq=SEQ,
        tokens=TOKENS,
    )
    return made


def device_anchor(gpu: Gpu) -> str:
    """The id of a device on the page of its arch."""
    return f"device-{gpu.name.lower().replace(' ', '-')}"


# ---------------------------------------------------------------- where it is from


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """One results file: what ours were measured on, and what measures them again."""

    path: str
    gpus: frozenset[str]
    """Short names of the products that it is of."""
    places: tuple[str, ...]
    commands: tuple[str, ...]


def _origins(paths: Iterable[Path]) -> list[Origin]:
    found = []
    for path in paths:
        device = [row for row in load(path) if row.regime == "device"]
        ours = [row for row in device if row.measured is not None and is_ours(row.contender)]
        if ours:
            found.append(_origin(f"bench/results/{path.parent.name}/{path.name}", ours))
    return found


def _origin(path: str, ours: Sequence[Result]) -> Origin:
    known = (find_gpu(row.environment.gpu) for row in ours)
    gpus = frozenset(gpu.name for gpu in known if gpu is not None)
    return Origin(path=path, gpus=gpus, places=tuple(provenance(ours)), commands=commands(ours))


def _compilers(records: Iterable[Record]) -> dict[str, str]:
    """By backend; more than one where targets were compiled with different ones."""
    told = {name: dict.fromkeys(it.compilers[name] for it in records if name in it.compilers) for name in BACKENDS}
    return {name: ", ".join(versions) or "none on record" for name, versions in told.items()}


# ---------------------------------------------------------------- across the targets


@dataclass(frozen=True, kw_only=True, slots=True)
class Map:
    """A heat map in one direction."""

    heat: Heat
    lines: tuple[Line, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A product, and its ceilings in a direction or both."""

    gpu: Gpu
    ceilings: Mapping[Direction, tuple[Ceiling, ...]]

    def by_problem(self, direction: Direction) -> list[tuple[Ceiling, ...]]:
        """Those of each head_dim and mask together, one of each length."""
        found, width = self.ceilings[direction], len(target_docs.SEQS)
        return [found[start : start + width] for start in range(0, len(found), width)]


def _device(gpu: Gpu, measurements: Sequence[Measurement]) -> Device:
    made = {direction: tuple(target_views.ceilings(gpu, direction, measurements)) for direction in DIRECTIONS}
    return Device(gpu=gpu, ceilings=made)


def _index(
    recorded: Mapping[str, Record],
    found: Mapping[Direction, list[Row]],
    measurements: Sequence[Measurement],
    origins: Sequence[Origin],
) -> dict[str, Any]:
    maps = {
        direction: [Map(heat=heat, lines=tuple(target_views.heat_lines(lines, heat))) for heat in MAPS]
        for direction, lines in found.items()
    }
    every = [line for lines in found.values() for line in lines]
    return {
        "current": INDEX,
        "maps": maps,
        "notes": target_views.notes(every),
        "devices": [_device(gpu, measurements) for gpu in GPUS],
        "seqs": target_docs.SEQS,
        "compilers": _compilers(recorded.values()),
        "origins": origins,
        "compiled": sum(entry.ok for record in recorded.values() for entry in record.entries),
        "targets": len(recorded),
    }


# ---------------------------------------------------------------- one target


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One kernel of a cell, as its row and what opens below it."""

    kernel: Facts
    slots: tuple[target_views.Slot, ...]
    mixed: target_views.Mixed
    remarks: tuple[remarks.Row, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One cell on its arch's page: kernels, or why there are none."""

    cell: Cell
    label: tuple[str, str]
    entry: Entry | None
    parts: tuple[Part, ...]
    why_empty: str


def _target(
    arch: str,
    record: Record | None,
    found: Mapping[Direction, list[Row]],
    measurements: Sequence[Measurement],
    origins: Sequence[Origin],
    profiled: Sequence[Profiled],
) -> dict[str, Any]:
    devices = [gpu for gpu in GPUS if gpu.arch == arch]
    lines = _sources(record)
    return {
        "current": target_views.page_of(arch),
        "arch": ARCHS[arch],
        "columns": target_views.COLUMNS,
        "places": {
            direction: _by_backend(arch, found[direction], lines.get(direction, {})) for direction in DIRECTIONS
        },
        "notes": _notes(arch, found),
        "devices": [_device(gpu, measurements) for gpu in devices],
        "backends": BACKENDS,
        "compilers": _compilers([record] if record is not None else []),
        "sources": dict(record.sources) if record is not None else {},
        "profiled": profiled,
        "compared": target_profiles.COMPARED,
        "figures": target_profiles.figures(profiled),
        "origins": {gpu.name: [origin for origin in origins if gpu.name in origin.gpus] for gpu in devices},
    }


def _notes(arch: str, found: Mapping[Direction, list[Row]]) -> list[Note]:
    return target_views.notes(
        (cell, {arch: entries[arch]}) for direction in DIRECTIONS for cell, entries in found[direction]
    )


def _by_backend(arch: str, found: Sequence[Row], lines: Mapping[str, str]) -> dict[str, list[Place]]:
    places: dict[str, list[Place]] = {}
    for cell, entries in found:
        places.setdefault(cell.backend, []).append(_place(cell, entries[arch], lines))
    return places


def _place(cell: Cell, entry: Entry | None, lines: Mapping[str, str]) -> Place:
    kernels = () if entry is None else entry.kernels
    return Place(
        cell=cell,
        label=target_views.label(cell),
        entry=entry,
        parts=tuple(_part(kernel, lines) for kernel in kernels),
        why_empty="" if kernels else target_views.why_empty(entry),
    )


def _part(kernel: Facts, lines: Mapping[str, str]) -> Part:
    return Part(
        kernel=kernel,
        slots=tuple(column.slot(kernel) for column in target_views.COLUMNS),
        mixed=target_views.mixed(kernel),
        remarks=remarks.with_sources(kernel.remarks, lines),
    )


def _sources(record: Record | None) -> dict[Direction, dict[str, str]]:
    """cuTile's kernels by file name, for the lines that remarks are of: only of the sources that were compiled."""
    if record is None:
        return {}
    now = current_sources()
    current = [it for it in DIRECTIONS if record.sources.get(f"cutile {it}") == now[f"cutile {it}"]]
    files = sorted((ROOT / "multiattn" / "cutile" / "kernels").glob("*.py"))
    return {direction: {path.name: path.read_text() for path in files} for direction in current}
