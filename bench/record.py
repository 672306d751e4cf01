"""``python -m bench record``: one file per arch that says what the compilers make of every rule, and what changed."""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch.nn.attention.flex_attention import create_block_mask

from bench.matrix import InputError
from bench.options import add_jobs
from bench.record_kernels import Kernel, compile_task, promised_without_spills
from bench.results import ROOT, dump, grouped, read
from multiattn.bars import Bar
from multiattn.inspect.mix import GENERATIONS
from multiattn.inspect.options import sizes_of
from multiattn.inspect.pool import run_isolated
from multiattn.layout import DTYPES, STORED
from multiattn.operands import Operands, Options, ScoreSpec, with_score
from multiattn.plan import backend as registry
from multiattn.plan.arch import GPU_ARCHS, by_name
from multiattn.plan.backend import BACKENDS, DIRECTIONS, Direction, Plan, Variant, plan_variant
from multiattn.plan.config import Rule, has_whole_sectors, select
from multiattn.plan.toolchain import find_cuobjdump
from multiattn.problem import Problem, problem_of
from multiattn.sequences import Batching, Scaling

SCHEMA = 1
FOLDER = ROOT / "bench" / "compiled"
TIMEOUT_S = 900.0
KINDS = ("same", "note", "changed", "regression", "missing", "failed")
"""The verdicts on a rule, from good to bad. A note is a difference that another compiler may make."""
_TOOLS = ("triton", "cuda-tile", "tileiras", "nvidia-cuda-nvrtc")
_TOOL = re.compile(r"([\w-]+) (\d+(?:\.\d+)*)")

Kernels = tuple[Kernel, ...]
Key = tuple[str, ...]
"""A Plan's name in the record: backend, direction, variant, arch, head_dim, mask, config."""


# ---------------------------------------------------------------- rules

HEAD_DIMS = (64, 128, 256)
SAMPLED = 128
SEQ, BATCH, HEADS = 4096, 4, 16
GROUP, PAGES = 8, (16, 64, 5)
"""Query heads that share keys, and keys of a page, where a rule is for few queries or for caches."""
RULE_DTYPES = ("bf16", "fp16")  # the first unless a rule is for the other alone
RUNG_ARCHS = ("sm80", "sm90")
"""The arches that rules of ``only_named`` variants are compiled for: one with and one without wgmma and TMA."""


def key_of(plan: Plan) -> Key:
    """The name of a Plan."""
    problem = plan.problem
    mask = problem.mask if problem.packing is None else f"{problem.mask} packed"
    if problem.cache is not None:
        mask += f" cache {problem.queries} x {problem.group}" + (f" {problem.stored}" if problem.stored else "")
    elif problem.group > 1:
        mask += f" {problem.queries} x {problem.group}"
    if problem.blocks is not None:
        mask += f" blocks {problem.blocks.queries}"
    *_, head_dims = sizes_of(problem)
    where = (plan.backend, plan.direction, plan.variant, plan.arch.name, head_dims, mask)
    return (*where, str(plan.config))


def walk_rules(
    backends: Sequence[str] = BACKENDS, directions: Sequence[Direction] = DIRECTIONS
) -> tuple[list[Plan], list[str]]:
    """A Plan for every rule, arch, head_dim and mask, with a problem for which the rule is the one chosen.

    Rules of one config share a Plan. Of variants that must be named only those that span the flags are walked, on
    `RUNG_ARCHS`: there may be a hundred. Beside the Plans, a line for each rule of other variants that no problem
    chooses on an arch which it names and its variant runs on.
    """
    found: dict[Key, Plan] = {}
    dead: list[str] = []
    for name, direction in itertools.product(backends, directions):
        op = registry.get(name).op(direction)
        walked = [it for it in op.variants if not it.only_named or not op.spanning or it.name in op.spanning]
        for variant, rule, arch in ((it, rule, arch) for it in walked for rule in it.rules for arch in GPU_ARCHS):
            if arch not in rule.arches or (variant.only_named and arch not in RUNG_ARCHS):
                continue
            plans = list(_plans_of(name, direction, variant, rule, arch))
            found |= {key: plan for plan in plans if (key := key_of(plan)) not in found}
            if not plans and not variant.only_named and arch in variant.capability.arches:
                dead.append(f"{name} {direction} {variant.name} {arch}: nothing chooses the rule {rule}")
    return list(found.values()), dead


def _plans_of(backend: str, direction: Direction, variant: Variant, rule: Rule[Any], arch: str) -> Iterator[Plan]:
    head_dims = _head_dims(rule, variant.capability.head_dim_multiple)
    masks = (False, True) if rule.banded is None else (rule.banded,)
    for head_dim, causal in itertools.product(head_dims, masks):
        plan = _plan(backend, direction, variant, rule, arch, head_dim, causal)
        if plan is not None:
            yield plan


def _head_dims(rule: Rule[Any], multiple: int) -> list[int]:
    """The `HEAD_DIMS` of a rule; and its widest where there is none, or earlier rules may take all."""
    itemsize = DTYPES[RULE_DTYPES[0]].itemsize  # as of the other
    allowed = [
        it
        for it in range(rule.head_dim_min, rule.head_dim_max + 1)
        if it % multiple == 0 and rule.whole_sectors in (None, has_whole_sectors(it, itemsize))
    ]
    found = [it for it in HEAD_DIMS if it in allowed]
    return found if found and rule.head_dim_max <= HEAD_DIMS[-1] else [*found, *allowed[-1:]]


def _plan(
    backend: str, direction: Direction, variant: Variant, rule: Rule[Any], arch: str, head_dim: int, causal: bool
) -> Plan | None:
    """The Plan of the first problem for which `rule` is chosen, of lengths that it is for; None if there is none."""
    target = by_name(arch)
    is_cached = rule.cached or (variant.capability.caches and rule.cached is None and not rule.only_named)
    sizes = (_lengths(variant.rules), _batches(variant.rules), PAGES if is_cached else PAGES[:1])
    for is_mapped, dtype, seq, batch, page in itertools.product((True, False), RULE_DTYPES, *sizes):
        is_grouped, pages = is_cached or rule.rows_max is not None, -(-seq // page)
        heads_kv = HEADS // GROUP if is_grouped else HEADS
        scales = Scaling(shape=(batch, heads_kv), strides=(heads_kv, 1)) if rule.stored else None
        more = {"k_scaling": scales, "v_scaling": scales}
        cache = Batching.cached(batch, batch * pages, page, pages, **more) if is_cached else None
        problem = Problem.contiguous(
            batch=1 if rule.packed else batch,
            heads_q=HEADS,
            heads_kv=heads_kv,
            seq_q=seq if rule.rows_max is None else -(-rule.rows_max // GROUP),
            seq_kv=seq,
            head_dim=head_dim,
            head_dim_v=min(head_dim, rule.head_dim_v_max or head_dim),
            dtype=dtype,
            causal=causal,
            batching=Batching.packed(batch) if rule.packed else cache,
            stored=next(iter(STORED)) if rule.stored else None,
        )
        if not is_mapped:
            problem = replace(problem, strides_k=(0, *problem.strides_k[1:]))
        if rule.scored or rule.reads_keys:
            problem = replace(problem, score=example_score(reads_keys=bool(rule.reads_keys)))
        if rule.block_multiple:
            problem = with_blocks(problem, math.lcm(rule.block_multiple, rule.config.tile_n), scored=bool(rule.scored))
        if select(variant.rules, problem, target)[0] is rule:
            plan = plan_variant(registry.get(backend), variant, problem, target, direction=direction)
            if isinstance(plan, Plan):
                return plan
    return None


@functools.cache
def example_score(*, reads_keys: bool) -> ScoreSpec | None:
    """The expression of a rule for modified scores: ALiBi, or a bias of each score."""
    q = torch.empty(1, HEADS, 2, 8, dtype=torch.bfloat16)
    alibi_slopes = None if reads_keys else torch.empty(HEADS)
    bias = torch.empty(1, HEADS, 2, 2, dtype=q.dtype) if reads_keys else None
    return problem_of(*with_score(Operands(q, q, q), Options(), None, alibi_slopes, bias, None)).score


def with_blocks(problem: Problem, size: int, *, scored: bool) -> Problem:
    """The problem with a block mask, causal, in blocks of so many queries and keys; `scored`: and with ALiBi."""
    q = torch.empty(1, HEADS, size, 8, dtype=torch.bfloat16)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, size, size, device=q.device, BLOCK_SIZE=size)
    alibi_slopes = torch.empty(HEADS) if scored else None
    known = problem_of(*with_score(Operands(q, q, q), Options(), None, alibi_slopes, None, None, mask))
    rows, columns = -(-problem.seq_q // size), -(-problem.seq_kv // size)
    each = {"kv": (1, 1, rows, columns), "q": (1, 1, columns, rows)}
    lists = tuple(it[:-1] if last == 3 else it for it in each.values() for last in (3, 4, 3, 4))
    return replace(problem, score=known.score, blocks=known.blocks, lists=lists)


def _lengths(rules: Sequence[Rule[Any]]) -> list[int]:
    """Lengths on either side of every limit of the rules, the usual one first."""
    edges = {rule.seq_min for rule in rules} | {rule.seq_max + 1 for rule in rules if rule.seq_max is not None}
    near = {length for edge in edges for length in (edge - 1, edge) if length > 0}
    return list(dict.fromkeys((SEQ, *sorted(near, reverse=True))))


def _batches(rules: Sequence[Rule[Any]]) -> list[int]:
    edges = {rule.batch_max for rule in rules if rule.batch_max is not None}
    alone = [1] if any(rule.queries_max or rule.queries_min for rule in rules) else []
    return list(dict.fromkeys((BATCH, *sorted(batch for edge in edges for batch in (edge, edge + 1)), *alone)))


# ---------------------------------------------------------------- compilers


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The record of one arch: its compilers by backend, and the kernels of each case."""

    compilers: Mapping[str, str]
    rows: Mapping[Key, Kernels]

    def kernels_of(self, plan: Plan) -> Kernels:
        """The kernels of a Plan; none where the record has no such rule."""
        return self.rows.get(key_of(plan), ())


EMPTY = Record(compilers={}, rows={})


def compiler(backend: str) -> str:
    """The versions of the tools that decide a backend's machine code."""
    versions = registry.get(backend).versions()
    return ", ".join(f"{name} {it}" for name, it in versions.items() if name in _TOOLS)


def is_older(versions: str, than: str) -> bool:
    """Tell whether one answer of `compiler` names an older release of a tool than another answer does."""

    def numbers(release: str) -> list[int]:  # 3.9 and 3.9.0 are the same release
        return [int(part) for part in re.sub(r"(\.0+)+$", "", release).split(".")]

    ours, theirs = ({name: numbers(release) for name, release in _TOOL.findall(text)} for text in (versions, than))
    return any(release < theirs[name] for name, release in ours.items() if name in theirs)


# ---------------------------------------------------------------- compared


def compare(before: Kernels, now: Kernels, *, recorded_with: str, made_with: str) -> tuple[str, list[str]]:
    """The verdict on a rule, one of `KINDS`, and what differs in words.

    A compiler older than the one on record may make anything; a newer one may make other code that is no worse. So may
    one that was given the same: of one kernel for sm103 (cuTile, D=128, 256x128) tileiras 13.4 makes four codes.
    """
    if not before:
        return "missing", ["not on record"]
    if [it.digest for it in before] == [it.digest for it in now]:
        return "same", []
    pairs = list(zip(before, now, strict=False))
    texts = [f"{len(before)} kernels -> {len(now)}"] if len(before) != len(now) else []
    texts += [f"{new.name}: {_difference(old, new)}" for old, new in pairs if old.digest != new.digest]
    worse = any(is_worse(*pair) for pair in pairs)
    is_compilers_own = made_with != recorded_with or [it.key for it in before] == [it.key for it in now]
    if is_older(made_with, than=recorded_with) or (is_compilers_own and not worse):
        return "note", texts
    return ("regression" if worse else "changed"), texts


def is_worse(before: Kernel, now: Kernel) -> bool:
    """More spills or stack, less occupancy, no loop on tensor cores, or a feature or compiler's choice that is lost."""
    more = any(getattr(now, it) > getattr(before, it) for it in ("hot_spills", "other_spills", "stack_bytes"))
    less = any(getattr(now, it) < getattr(before, it) for it in ("blocks", "share"))
    lost = {*before.features, *before.chosen} - {*now.features, *now.chosen}
    oldest, newest = (max((at for at, name in GENERATIONS.items() if name in it.features), default=-1)
                      for it in (before, now))  # fmt: skip
    if newest >= oldest:
        lost -= {*GENERATIONS.values()}
    return more or less or bool(lost) or (before.hot_loops > 0 and now.hot_loops == 0)


def _difference(before: Kernel, now: Kernel) -> str:
    old, new = asdict(before), asdict(now)
    names = [name for name in old if old[name] != new[name] and name not in ("key", "digest")]
    return ", ".join(f"{name} {old[name]} -> {new[name]}" for name in names) or "other code of the same counts"


def promises(rows: Mapping[Key, Kernels]) -> Iterator[str]:
    """A line for each kernel on record that breaks a promise: no room on an SM, or spills where none may be."""
    for key, kernels in rows.items():
        allowed = promised_without_spills(key)
        for it in kernels:
            where = f"{' '.join(key)}, kernel {it.name}"
            if it.blocks == 0:
                yield f"not one block fits an SM ({it.limiter}): {where}"
            if allowed is not None and it.hot_spills > allowed:
                yield f"{it.hot_spills} spills in its hot loops: {where}"


def sample(wanted: Iterable[Plan]) -> list[Plan]:
    """One rule per backend and arch, the same ones every time: directions take turns, hashes choose.

    Of head dims up to `SAMPLED`: wider kernels compile longer, and show no more.
    """
    groups = grouped(sorted(wanted, key=key_of), lambda plan: (plan.backend, plan.arch.name))
    chosen = []
    for place, (name, members) in enumerate(sorted(groups.items())):
        turn = ("forward", "backward")[place % 2]
        mine = [it for it in members if it.direction == turn and it.problem.head_dim <= SAMPLED] or members
        chosen.append(mine[int(hashlib.sha256(repr(name).encode()).hexdigest(), 16) % len(mine)])
    return chosen


# ---------------------------------------------------------------- kept


def load(path: Path) -> Record:
    """The record of one arch that `save` wrote; InputError for another file."""

    def record(data: dict[str, Any]) -> Record:
        rows = {tuple(row["key"]): tuple(map(Kernel.from_dict, row["kernels"])) for row in data["rows"]}
        return Record(compilers=data["compilers"], rows=rows)

    return read(path, SCHEMA, record)


def load_all() -> dict[str, Record]:
    """The record of every arch that has one, by name."""
    found = {arch: FOLDER / f"{arch}.json" for arch in GPU_ARCHS}
    return {arch: load(path) for arch, path in found.items() if path.exists()}


def save(record: Record, arch: str, folder: Path) -> None:
    """Write the record of one arch: a line per rule, head_dim and mask."""
    rows = [{"key": key, "kernels": list(map(asdict, record.rows[key]))} for key in sorted(record.rows)]
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{arch}.json.new"
    draft.write_text(dump({"schema": SCHEMA, "arch": arch, "compilers": dict(record.compilers), "rows": rows}))
    draft.replace(folder / f"{arch}.json")


# ---------------------------------------------------------------- the command


def run(options: argparse.Namespace) -> int:
    """Compile every rule and write what changed; with --check write nothing, and fail where the record is not right."""
    if find_cuobjdump() is None:
        raise InputError("there is no cuobjdump to read cubins with: pip install 'multiattn[inspect]'")
    if options.sample and not options.check:
        raise InputError("--sample: got it without --check; allowed with it")
    (plans, dead), recorded = walk_rules(), load_all()
    everything = {key_of(plan): plan for plan in plans}
    wanted = [plan for key, plan in everything.items() if _asked(key, options)]
    made, verdicts = _compile(sample(wanted) if options.sample else wanted, recorded, options)
    print(count_table(verdicts))
    if not options.check:
        write(made, recorded, everything)
        print(f"\nWritten: {FOLDER.relative_to(ROOT)}: {len(made)} rules")
        return int(any(kind == "failed" for kind, _ in verdicts))
    rows = {key: kernels for record in recorded.values() for key, kernels in record.rows.items()}
    gone = (key for key in rows if key not in everything and _asked(key, options))
    lines = [*(f"no rule has it any more: {' '.join(key)}" for key in gone), *promises(rows), *dead]
    print("".join(f"\n{line}" for line in lines))
    wrong = len(lines) + sum(kind not in ("same", "note") for kind, _ in verdicts)
    print(f"{len(verdicts)} rules compiled, {wrong} failures" + ("; run python -m bench record" if wrong else ""))
    return int(bool(wrong))


def _asked(key: Key, options: argparse.Namespace) -> bool:
    return key[0] in (options.backend or BACKENDS) and key[3] in (options.arch or GPU_ARCHS)


def _compile(
    chosen: Sequence[Plan], recorded: Mapping[str, Record], options: argparse.Namespace
) -> tuple[dict[Key, Kernels], list[tuple[str, Plan]]]:
    """The kernels of each rule, and the verdict on it against the record; what differs is printed as it is found."""

    def before(plan: Plan) -> Record:
        return recorded.get(plan.arch.name, EMPTY)

    work = [(it, before(it).kernels_of(it)) for it in chosen]
    made: dict[Key, Kernels] = {}
    verdicts: list[tuple[str, Plan]] = []
    compiled = run_isolated(compile_task, work, jobs=options.jobs, timeout_s=TIMEOUT_S)
    for done, outcome in enumerate(Bar(compiled, total=len(work), desc="compiling", unit="rule", disable=None), 1):
        plan, kind, texts = outcome.item[0], "failed", [outcome.error]
        if outcome.result is not None:
            made[key_of(plan)] = outcome.result
            told = before(plan).compilers.get(plan.backend, "")
            versions = {"recorded_with": told, "made_with": compiler(plan.backend)}
            kind, texts = compare(before(plan).kernels_of(plan), outcome.result, **versions)
        verdicts.append((kind, plan))
        with Bar.external_write_mode():
            print("".join(f"{kind}: {' '.join(key_of(plan))}: {text}\n" for text in texts), end="", flush=True)
        if done % 50 == 0:
            print(f"[{done}/{len(work)}]", flush=True)
    return made, verdicts


def count_table(verdicts: Iterable[tuple[str, Plan]]) -> str:
    """How many rules of each backend and direction are the same as on record, and how many of each other kind."""
    counts = Counter((plan.backend, plan.direction, kind) for kind, plan in verdicts)
    places = dict.fromkeys(place[:2] for place in sorted(counts))
    rows = [(*place, *(counts[place[0], place[1], kind] for kind in KINDS)) for place in places]
    return tabulate(rows, headers=("backend", "direction", *KINDS))


def write(made: Mapping[Key, Kernels], recorded: Mapping[str, Record], alive: Container[Key]) -> None:
    """Write the arches of `made` anew: what was not made again stays, unless no rule has it any more."""
    for arch in dict.fromkeys(key[3] for key in made):
        before = recorded.get(arch, EMPTY)
        mine = {key: kernels for key, kernels in made.items() if key[3] == arch}
        told = {key[0]: compiler(key[0]) for key in mine}
        rows = {key: kernels for key, kernels in before.rows.items() if key in alive} | mine
        save(Record(compilers={**before.compilers, **told}, rows=rows), arch, FOLDER)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of the command."""
    command.add_argument("--check", action="store_true", help="write nothing; exit 1 where the record is not right")
    command.add_argument("--sample", action="store_true", help="with --check: one rule per backend and arch")
    command.add_argument("--backend", action="append", choices=BACKENDS, help="may be given again; default all")
    command.add_argument("--arch", action="append", choices=GPU_ARCHS, help="may be given again; default all")
    add_jobs(command)
