"""Sweeps to rules: who wins where, in bands of lengths that are worth a rule each, with their numbers as evidence.

A tuned head_dim speaks for its class and those below, down to the next smaller class that has one; a tuned length for
those up to the geometric middle between it and its neighbours, the first and the last for all beyond. Nothing here
needs a GPU.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from bench import tune_results
from bench.environment import ROOT, is_clone
from bench.errors import InputError
from bench.flops import rate_text
from bench.matrix import Cell
from bench.tune import Trial
from bench.tune_results import Sweep, Tried
from multiattn import backend as registry
from multiattn import tuned
from multiattn.arch import ARCHS, Arch
from multiattn.backend import Direction, Variant
from multiattn.config import Config
from multiattn.cuda import wgmma_configs
from multiattn.triton.gluon import configs as gluon_configs
from multiattn.tuned import Tuned


@dataclass(frozen=True, kw_only=True, slots=True)
class _Backend:
    """What a backend's sweeps are to rules."""

    config: Callable[..., Config]
    class_of: Callable[[int], int | None]
    """The widest head_dim of those that are tuned together with one."""
    compiler: str
    """As evidence calls it."""
    package: str
    """Whose version it has."""


BACKENDS: Mapping[str, _Backend] = {
    "cuda": _Backend(
        config=wgmma_configs.WgmmaConfig,
        class_of=wgmma_configs.class_of,
        compiler="NVRTC",
        package="nvidia-cuda-nvrtc",
    ),
    "triton": _Backend(
        config=gluon_configs.GluonConfig, class_of=gluon_configs.class_of, compiler="Triton", package="triton"
    ),
}
RULE_COST = 0.01
"""What one more rule must gain, in all its lengths together: a percent of one of them."""
TIE = 0.002
"""By how little what was a rule when it was swept, of any of some lengths, may lose in their mean and be kept."""
DIRECTIONS: Mapping[str, Direction] = {"fwd": "forward", "bwd": "backward"}
"""Of a cell, and whose kernels it times alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """All sweeps at one length, of a variant, arch, head_dim and mask."""

    seq: int
    sweeps: tuple[Sweep, ...]

    def scores(self) -> dict[str, float]:
        """By config, as JSON: its rate over the fastest, in the sweep where that is least. Of configs in all sweeps."""
        shares = [{name: it / max(rates.values()) for name, it in rates.items()} for rates in map(_rates, self.sweeps)]
        return {name: min(share[name] for share in shares) for name in shares[0] if all(name in it for it in shares)}

    def losses(self) -> dict[str, float]:
        """What each of `scores` loses to the best of them, as a share. InputError where no config is in all sweeps."""
        scores = self.scores()
        if not scores:
            cells = "; ".join(f"{it.environment.gpu} {it.cell.key}" for it in self.sweeps)
            raise InputError(f"no config was timed in all of these, so that they give no rule together: {cells}")
        best = max(scores.values())
        return {name: 1 - score / best for name, score in scores.items()}


def _rates(sweep: Sweep) -> dict[str, float]:
    return {_key(it): it.tflops for it in sweep.tried if it.tflops and it.config and _fits_class(sweep, it.config)}


def _fits_class(sweep: Sweep, fields: Mapping[str, Any]) -> bool:
    """Whether a config fits the widest head_dim that a rule with it would speak for."""
    backend, direction, name = _variant(sweep)
    variant = registry.find_variant(registry.get(backend), name, direction=direction)
    config = BACKENDS[backend].config(**fields)
    return _fits_widest(backend, variant, config, sweep.cell, ARCHS[sweep.environment.arch])


def _fits_widest(backend: str, variant: Variant, config: Config, cell: Cell, arch: Arch) -> bool:
    return not variant.fits(replace(cell, head_dim=_widest(backend, cell)).problem, arch, config)


def may_be_rule(trial: Trial) -> bool:
    """Whether a rule could have a candidate's config: one that is not taken from sweeps could have any."""
    plan = trial.plan
    if plan is None or plan.config is None or (plan.backend, plan.direction, plan.variant) not in tuned.VARIANTS:
        return True
    return _fits_widest(plan.backend, registry.variant_of(plan), plan.config, trial.cell, plan.arch)


def _key(tried: Tried) -> str:
    return json.dumps(tried.config, sort_keys=True)


# ---------------------------------------------------------------- derived


def derive(sweeps: Sequence[Sweep]) -> list[Tuned]:
    """The rules that sweeps give: of the variants in `multiattn.tuned.VARIANTS`, whatever else was swept."""
    usable = [sweep for sweep in sweeps if _is_tuned(sweep) and _rates(sweep)]
    rules: list[Tuned] = []
    for group in _grouped(usable, lambda it: (*_variant(it), it.environment.arch, it.cell.causal)):
        below = 0
        for of_head_dim in _grouped(group, lambda it: _widest(it.backend, it.cell)):
            first = of_head_dim[0]
            rules += _rules(of_head_dim, below + 1, widest := _widest(first.backend, first.cell))
            below = widest
    return rules


def _widest(backend: str, cell: Cell) -> int:
    """The largest head_dim of its class."""
    widest = BACKENDS[backend].class_of(cell.head_dim)
    assert widest is not None, f"a sweep at head_dim {cell.head_dim}, beyond all classes"
    return widest


def _is_tuned(sweep: Sweep) -> bool:
    return sweep.cell.direction in DIRECTIONS and _variant(sweep) in tuned.VARIANTS


def _variant(sweep: Sweep) -> tuple[str, Direction, str]:
    return sweep.backend, DIRECTIONS[sweep.cell.direction], sweep.variant


def _grouped(sweeps: Sequence[Sweep], key: Any) -> list[list[Sweep]]:
    return [list(members) for _, members in groupby(sorted(sweeps, key=key), key=key)]


def _rules(sweeps: Sequence[Sweep], head_dim_min: int, head_dim_max: int) -> Iterator[Tuned]:
    """Those of one variant, arch, head_dim and mask, by length."""
    groups = _grouped(sweeps, lambda it: it.cell.seq)
    bands = _bands([_Place(seq=group[0].cell.seq, sweeps=tuple(group)) for group in groups])
    seq_min = 0
    for number, (config, places) in enumerate(bands):
        seq_max = None if number + 1 == len(bands) else math.isqrt(places[-1].seq * bands[number + 1][1][0].seq)
        first = sweeps[0]
        yield Tuned(
            backend=first.backend,
            variant=first.variant,
            direction=DIRECTIONS[first.cell.direction],
            arches=(first.environment.arch,),
            head_dim_min=head_dim_min,
            head_dim_max=head_dim_max,
            causal=first.cell.causal,
            seq_min=seq_min,
            seq_max=seq_max,
            config=json.loads(config),
            why=evidence(config, [sweep for place in places for sweep in place.sweeps]),
        )
        seq_min = 0 if seq_max is None else seq_max + 1


def _bands(places: Sequence[_Place]) -> list[tuple[str, list[_Place]]]:
    """Neighbouring lengths, each under one config: of all ways to part them, what costs least.

    It costs what configs lose to the fastest of each length, summed, and `RULE_COST` a band.
    """
    cheapest: list[tuple[float, list[tuple[str, list[_Place]]]]] = [(0.0, [])]  # of the first 0, 1, 2 ... lengths
    for end in range(1, len(places) + 1):
        ways = []
        for start in range(end):
            cost, before = cheapest[start]
            if (best := _best_of_all(places[start:end])) is not None:
                loss, config = best
                ways.append((cost + loss + RULE_COST, [*before, (config, list(places[start:end]))]))
        cheapest.append(min(ways, key=lambda way: way[0]))
    return cheapest[-1][1]


def _best_of_all(places: Sequence[_Place]) -> tuple[float, str] | None:
    """The least that a config loses in these lengths together, and that config; None where they share none.

    A rule that ties with it is named in its place, at no cost: else to keep one could be worth another rule.
    """
    losses = [place.losses() for place in places]
    shared = [name for name in losses[0] if all(name in it for it in losses)]
    ranking = sorted((sum(it[name] for it in losses), name) for name in shared)
    if not ranking:
        return None
    least, fastest = ranking[0]
    rules = {_key(it) for place in places for sweep in place.sweeps for it in sweep.tried if it.is_rule}
    ties = [name for loss, name in ranking if loss <= least + TIE * len(places) and name in rules]
    return least, ties[0] if ties else fastest


# ---------------------------------------------------------------- evidence


def evidence(config: str, sweeps: Sequence[Sweep]) -> str:
    """What was measured of a config (as JSON) where its rule was tuned: by setup, each cell's rates in TFLOPS."""
    by_setup = {it: [sweep for sweep in sweeps if _setup(sweep) == it] for it in map(_setup, sweeps)}
    return "; ".join(
        f"{setup}: {'; '.join(_told(config, sweep) for sweep in members)}" for setup, members in by_setup.items()
    )


def _setup(sweep: Sweep) -> str:
    of = sweep.environment
    backend = BACKENDS[sweep.backend]
    compiler = f"{backend.compiler} {of.versions.get(backend.package, 'unknown')}"
    return f"{of.gpu.removeprefix('NVIDIA ')}, {of.date}, {of.commit}, {compiler}"


def _told(config: str, sweep: Sweep) -> str:
    cell = sweep.cell
    timed = sorted((it for it in sweep.tried if it.tflops), key=lambda it: -(it.tflops or 0.0))
    (mine,) = (it for it in timed if _key(it) == config)
    others = [it for it in timed if _key(it) != config]
    before = next((it for it in sweep.tried if it.is_rule), None)
    told = [f"{rate_text(mine.tflops or 0.0)} TFLOPS"]
    told += [f"next {_shown(others[0])}"] if others else []
    if before is not None:
        told.append("as the rule before" if _key(before) == config else f"before {_shown(before)}")
    if sweep.yardstick_tflops:
        told.append(f"{sweep.yardstick} {rate_text(sweep.yardstick_tflops)}")
    where = f"B{cell.batch} H{cell.heads_text} N={cell.seq} D={cell.head_dim} {cell.dtype} {cell.mask}"
    return f"{where} {', '.join(told)}"


def _shown(tried: Tried) -> str:
    """A config's own words, and its rate."""
    rate = "untimed" if not tried.tflops else rate_text(tried.tflops)
    return f"{rate} ({tried.name.partition(' ')[2] or tried.name})"


# ---------------------------------------------------------------- kept


def tuned_path() -> Path:
    """multiattn/tuned.json of the checkout."""
    return ROOT / "multiattn" / "tuned.json" if is_clone() else Path.cwd() / "tuned.json"


def text_from(paths: Sequence[Path]) -> str:
    """What tuned.json is by the sweeps in these files; of two of one GPU, variant and cell the later file's counts."""
    sweeps = {sweep.key: sweep for path in paths for sweep in tune_results.load(path)}
    return tuned.dumps(derive(list(sweeps.values())))


def update(paths: Sequence[Path], path: Path, *, check: bool) -> bool:
    """Write the rules that files of sweeps give to `path`, or only compare; whether it was current."""
    text = text_from(paths)
    current = path.exists() and path.read_text() == text
    if not current and not check:
        path.write_text(text)
    return current
