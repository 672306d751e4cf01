"""Tables of what runs where: the README's, of each backend, and that of docs/, of each variant."""

from __future__ import annotations

from collections.abc import Sequence

from bench.comparison import TITLES
from bench.report import markdown
from multiattn.plan import backend as registry
from multiattn.plan.arch import ARCHS, GPU_ARCHS
from multiattn.plan.backend import BACKENDS, DIRECTIONS, Direction, Plan, Variant, plan_variant
from multiattn.problem import Problem
from multiattn.sequences import Batching


def support_block() -> str:
    """The head_dims that each offered variant takes on each arch, or why none; then the number of named rungs."""
    rows, more = [], []
    for name in BACKENDS:
        for direction in DIRECTIONS:
            op = registry.get(name).op(direction)
            for variant in op.offered:
                found = [supported_head_dims(name, variant, arch, direction) for arch in GPU_ARCHS]
                cells = (ranges(able) or "no: " + ", ".join(dict.fromkeys(codes)) for able, codes in found)
                rows.append((name, direction, variant.name, ", ".join(variant.capability.dtypes), *cells))
            if named := len(op.variants) - len(op.offered):
                rungs = f"{named} more rung{'s' if named > 1 else ''}, selected only by name"
                more.append(f"- {name} {direction} has {rungs}: [the ladders](ladder.md)")
    table = markdown(("backend", "direction", "variant", "dtypes", *GPU_ARCHS), rows)
    told = "A range is of head_dims, in multiples of 8; a word says what refuses the rest."
    return "\n\n".join(filter(None, (table, told, "\n".join(more))))


def supported_head_dims(backend: str, variant: Variant, arch: str, direction: Direction) -> tuple[list[int], list[str]]:
    """The multiples of 8 that a variant takes on an arch, by the data alone, and the codes of what refuses others."""
    able, codes = [], []
    for head_dim in range(8, variant.capability.head_dim_max + 1, 8):
        cache = Batching.cached(4, 4) if variant.capability.caches else None  # without one they are for few queries
        problem = Problem.contiguous(batch=4, heads_q=16, seq_q=4096, head_dim=head_dim, batching=cache)
        plan = plan_variant(registry.get(backend), variant, problem, ARCHS[arch], direction=direction)
        if isinstance(plan, Plan):
            able.append(head_dim)
        else:
            codes += [reason.code for reason in plan]
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


# ---------------------------------------------------------------- of the README

FAMILIES = {
    "Ampere and Ada": ("sm80", "sm86", "sm89"),
    "Hopper": ("sm90",),
    "Blackwell": ("sm100", "sm103", "sm120", "sm121"),
}
HEAD_DIMS = "head dims, multiples of 8, on "


def features_block() -> str:
    """Everything that a backend takes in a direction, by some variant that a caller may get without naming one.

    A line for all that is the same in each column.
    """
    header, columns = ["takes"], []
    for name in BACKENDS:
        for direction in DIRECTIONS:
            header.append(f"{TITLES[name]} {direction}")
            columns.append({**_head_dims_by_family(name, direction), **_features(name, direction)})
    alike: dict[tuple[str, ...], list[str]] = {}
    for title in columns[0]:
        alike.setdefault(tuple(column[title] for column in columns), []).append(title)
    rows = [(f"{titles[0]}{''.join(', ' + it.removeprefix(HEAD_DIMS) for it in titles[1:])}", *its)
            for its, titles in alike.items()]  # fmt: skip
    return markdown(header, rows)


def _usual(backend: str, direction: Direction) -> list[Variant]:
    """The variants that are not of caches alone."""
    return [it for it in registry.get(backend).op(direction).offered if not it.capability.caches]


def _head_dims_by_family(backend: str, direction: Direction) -> dict[str, str]:
    """The head_dims that some variant takes on every arch of a family."""
    found = {}
    for title, arches in FAMILIES.items():
        able = []
        for arch in arches:
            its = (supported_head_dims(backend, it, arch, direction)[0] for it in _usual(backend, direction))
            able.append({head_dim for some in its for head_dim in some})
        found[f"{HEAD_DIMS}{title} ({', '.join(arches)})"] = ranges(sorted(set.intersection(*able))) or "no"
    return found


def _multiples(sizes: Sequence[int]) -> str:
    return str(min(sizes)) if sizes else "no"


def _features(backend: str, direction: Direction) -> dict[str, str]:
    """Yes, no or a word for each thing that a problem may have."""
    usual = _usual(backend, direction)
    capabilities = [it.capability for it in usual]
    blocks, packed = (
        [size for size in its if size]
        for its in zip(*((it.block_masks, it.packed_blocks) for it in capabilities), strict=True)
    )
    able = {
        "windows": any("two_sided" in it.masks for it in capabilities),
        "sinks": any(it.sinks for it in capabilities),
        "softcap, ALiBi, bias, `score_mod`": any(it.scores for it in capabilities),
        "packed sequences": any(it.packing for it in capabilities),
        "`deterministic=True`": any(it.deterministic for it in usual),
        "on a CPU": any("cpu" in it.arches for it in capabilities),
        "caches, dense and paged": any(it.capability.caches for it in registry.get(backend).op(direction).offered),
        "of fp8 and int8": any(it.capability.stored for it in registry.get(backend).op(direction).offered),
        "`return_max=True`": any(it.row_max for it in capabilities),
    }
    words = {
        "dtypes": ", ".join(dict.fromkeys(dtype for it in capabilities for dtype in it.dtypes)),
        "block masks in multiples of": _multiples(blocks),
        "packed block masks in multiples of": _multiples(packed),
    }
    return {**words, **{title: "yes" if it else "no" for title, it in able.items()}}
