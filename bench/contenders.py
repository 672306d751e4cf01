"""Contenders, ready to be checked and timed: a forward, a backward, or one after the other. Ours are made of Plans.

Their results are held to parity's own budgets.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

import multiattn
from bench.decode_cells import DecodeCell, Served
from bench.features import hide_others, ids_of
from bench.matrix import Cell, Direction, InputError, Tensors
from bench.results import NO_GPU
from multiattn.block_mask import in_sequences, of_sequences, read_block_mask
from multiattn.layout import Strides
from multiattn.plan import backend as registry
from multiattn.plan.arch import Arch
from multiattn.plan.backend import BACKENDS, Plan, make_plan
from multiattn.plan.choice import choose
from multiattn.plan.config import Config
from multiattn.plan.support import Reason, Unsupported
from multiattn.problem import Problem, problem_of
from multiattn.run.execute import gradient_of_sinks
from multiattn.score import bind_score
from multiattn.sequences import Batching
from multiattn.tune.timing import Call, Contestant
from parity.gradients import GradTruth
from parity.tolerance import Expected, Mismatch, Packed, Truth, deviate

Results = Mapping[str, torch.Tensor]
"""The results of a contender by name: of out, lse, dq, dk, dv and dsinks those that its direction and cell have."""

GRADS = ("dq", "dk", "dv")
"""Gradients that every backward has."""
ALL_GRADS = (*GRADS, "dsinks")
"""Gradients of a cell with sinks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """Ready to be checked and timed in one cell."""

    launch: Contestant
    """For the regimes device and graph: nothing but the launches."""
    call: Contestant
    """For the call regime: the public call. Returns out, or the gradients of the cell's tensors."""
    output: Callable[[], Results]
    """Runs `launch` once and returns what it wrote."""
    plain: Contestant | None = None
    """Launches without the scores of a cell over a cache, and takes turns with `launch`; None for other cells."""
    plan: Plan | None = None
    """The Plan of the timed launch; of a forward and a backward it is the backward's."""
    detail: str = ""


class RefusedError(Exception):
    """A contender cannot run a cell; `reasons` say why."""

    def __init__(self, reasons: tuple[Reason, ...]) -> None:
        super().__init__("; ".join(map(str, reasons)))
        self.reasons = reasons


def named(returned: Any) -> Results:
    """The results that `Contender.call` returned, by name."""
    if isinstance(returned, torch.Tensor):
        return {"out": returned}
    return dict(zip(ALL_GRADS, returned, strict=False))


def require_grad(tensors: Tensors) -> Tensors:
    """Leaves of a graph with the memory of `tensors`."""
    return tuple(tensor.detach().requires_grad_() for tensor in tensors)


def alike(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`values` in the memory layout of `tensor`, as a gradient comes to a layer that is followed by a view."""
    return torch.empty_like(tensor).copy_(values)


def contender_of(plan: Plan, tensors: Tensors, cell: Cell, forward: Plan | None = None) -> Contender:
    """A contender that launches exactly `plan`, in the direction of `cell`.

    Outputs are made once, and poisoned with NaN before a check. A backward needs the Plan of the `forward` whose out
    and lse it is fed; that forward runs once, or before each launch where both are timed.
    """
    given, _ = cell.asked(tensors)
    q, first = given.q, plan if forward is None else forward
    shape, its_strides, dtype = first.problem.layouts["out"]
    out = torch.empty_strided(shape, its_strides, dtype=dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    launch_forward = registry.get(first.backend).forward.prepare(first)

    def run_forward() -> None:
        launch_forward(given._replace(out=out, lse=lse))

    written = {"out": out, "lse": lse}
    if forward is None:
        call = functools.partial(cell.attend, *tensors, backend=plan.backend, variant=plan.variant)
        return _contender(plan, run_forward, call, written)
    problem = plan.problem
    launch_backward = registry.get(plan.backend).backward.prepare(plan)
    dout = alike(out, cell.dout(q.device))
    strides = problem.strides_dq, problem.strides_dk, problem.strides_dv
    zipped = zip(GRADS, given.qkv, strides, strict=True)
    grads: dict[str, Any] = {name: _empty(tensor, its) for name, tensor, its in zipped}
    of_backward = given._replace(out=out, lse=lse, dout=dout, **grads)
    if given.sinks is not None:
        of_backward = of_backward._replace(delta=torch.empty_like(lse))
        grads["dsinks"] = torch.empty_like(given.sinks)

    def run_backward() -> None:
        launch_backward(of_backward)
        if given.sinks is not None:
            grads["dsinks"].copy_(gradient_of_sinks(of_backward))

    def run_both() -> None:
        run_forward()
        run_backward()

    run_forward()
    user = _call_with_grad(plan, tensors, dout, cell)
    told = f"forward: {forward.variant} {forward.config or ''}".strip()
    if cell.direction == "fwdbwd":
        return _contender(plan, run_both, user, {**written, **grads}, told)
    return _contender(plan, run_backward, user, grads, told)


def _contender(plan: Plan, launch: Call, user: Call, written: Results, detail: str = "") -> Contender:
    def output() -> Results:
        for tensor in written.values():
            tensor.fill_(math.nan)
        launch()
        return written

    return Contender(
        launch=Contestant(call=launch), call=Contestant(call=user), output=output, plan=plan, detail=detail
    )


def _empty(like: torch.Tensor, strides: Strides) -> torch.Tensor:
    return torch.empty_strided(like.shape, (*strides, 1), dtype=like.dtype, device=like.device)


def _call_with_grad(plan: Plan, tensors: Tensors, dout: torch.Tensor, cell: Cell) -> Callable[[], Tensors]:
    """The public call, `multiattn.fmha`, and autograd's gradient of it. Its forward runs at the first call."""
    leaves = require_grad(tensors)
    backend, deterministic = registry.get(plan.backend), registry.variant_of(plan).deterministic

    def forward() -> torch.Tensor:
        chosen = make_plan(backend, plan.problem, plan.arch, direction="backward", deterministic=deterministic)
        if chosen.variant != plan.variant:
            allowed = f"{chosen.variant}: fmha cannot be asked for others"
            raise RefusedError((Reason(code="variant", got=plan.variant, allowed=allowed),))
        return cell.attend(*leaves, backend=plan.backend, deterministic=deterministic)

    return differentiate(forward, leaves, dout, keeps_graph=cell.direction == "bwd")


def differentiate(
    forward: Callable[[], torch.Tensor], leaves: Tensors, dout: torch.Tensor, *, keeps_graph: bool
) -> Callable[[], Tensors]:
    """A call that returns the gradients of `leaves`, given that of what `forward` returns.

    With `keeps_graph` the forward runs once, at the first call, and its graph is walked again and again: autograd's
    share of the host is in it, the forward is not. Else each call runs the forward too.
    """
    graph: list[torch.Tensor] = []

    def call() -> Tensors:
        out = graph[0] if graph else forward()
        if keeps_graph and not graph:
            graph.append(out)
        return torch.autograd.grad(out, leaves, dout, retain_graph=keeps_graph)

    return call


def plan_data(plan: Plan) -> dict[str, Any]:
    """The part of a Plan that a row stores; problem, arch and backend are in the row already."""
    data = {"variant": plan.variant, "config": plan.config and asdict(plan.config), "why": plan.why}
    if plan.direction == "forward":
        return data
    deterministic = registry.variant_of(plan).deterministic
    return {**data, "deterministic": deterministic, "workspace_bytes": plan.workspace_bytes}


# ---------------------------------------------------------------- ours


@dataclass(frozen=True, kw_only=True, slots=True)
class Ours:
    """One backend; `variant` None is its best that can run the cell, `config` None is that of the variant's rule."""

    backend: str
    variant: str | None = None
    config: Config | None = None
    is_ours: bool = True

    @property
    def name(self) -> str:
        """``cuda``, ``cuda/basic``, or that and a config."""
        name = self.backend if self.variant is None else f"{self.backend}/{self.variant}"
        return name if self.config is None else f"{name} {self.config}"

    def why_not(self, cell: Cell, arch: Arch | None) -> tuple[Reason, ...]:
        """Every reason known before there is a tensor; `arch` None is a machine without a GPU."""
        if arch is None:
            return (NO_GPU,)
        try:
            self.plans(cell, cell.problem, arch)
        except Unsupported as error:
            return error.reasons
        return ()

    def prepare(self, cell: Cell, tensors: Any, arch: Arch) -> Contender:
        """The contender, with the Plan of these very tensors, as the public call would make it."""
        if isinstance(cell, DecodeCell):
            return over_cache(cell, tensors, self.backend, arch)
        plan, forward = self.plans(cell, cell.problem_of(tensors), arch)
        return contender_of(plan, tensors, cell, forward)

    def plans(self, cell: Cell, problem: Problem, arch: Arch) -> tuple[Plan, Plan | None]:
        """The Plan that a row is of, and of a backward also its forward's; Unsupported with every reason."""
        backend = registry.get(self.backend)
        plan = functools.partial(make_plan, backend, problem, arch)
        if cell.direction == "fwd":
            return plan(variant=self.variant, config=self.config), None
        return plan(direction="backward", variant=self.variant, config=self.config), plan()


def over_cache(cell: DecodeCell, served: Served, backend: str, arch: Arch) -> Contender:
    """The public call of a backend on each copy of a cache in turns; Unsupported with reasons."""
    out = cell.empty_out(served)
    asked = cell.asked(served, backend=backend, out=out)
    (plan,) = choose(problem_of(*asked), arch, asked[1], "forward")

    def calls_of(given: Served, **more: Any) -> list[Call]:
        options = {**cell.arguments(given), "backend": backend, **more}
        return [functools.partial(multiattn.fmha_kvcache, given.q, *it, **options) for it in given.caches]

    launches = calls_of(served, out=out)

    def output() -> Results:
        for launch in launches:
            out.fill_(math.nan)
            launch()
        return {"out": out}

    launch, call = (Contestant(call=in_turns(its)) for its in (launches, calls_of(served)))
    plain = None
    if served.scores:
        plain = Contestant(call=in_turns(calls_of(served._replace(scores={}), out=out)))
    return Contender(launch=launch, call=call, output=output, plain=plain, plan=plan)


def in_turns(calls: Sequence[Call]) -> Call:
    """One call that makes the next of `calls` each time, and begins again after the last."""
    turns = itertools.cycle(calls)

    def launch() -> Any:
        return next(turns)()

    return launch


def our_providers(
    backends: tuple[str, ...] = BACKENDS, variant: str | None = None, direction: Direction = "fwd"
) -> tuple[Ours, ...]:
    """One provider per backend; `variant` is None for the best, ``all`` for every one offered, or a name.

    In a backward the best of each backend stands beside one that is deterministic where the best is not, or is not
    where the best is: so every run says what determinism costs. InputError for a variant that no backend has.
    """
    ops = {name: registry.get(name).op("forward" if direction == "fwd" else "backward") for name in backends}
    found = [
        Ours(backend=name, variant=rung.name)
        for name, op in ops.items()
        for rung in op.variants
        if rung.name == variant or (variant == "all" and not rung.only_named)
    ]
    if variant is None:
        found = [Ours(backend=name) for name in backends]
        for name, op in ops.items():
            others = [it for it in op.offered if it.deterministic != op.offered[0].deterministic]
            found += [Ours(backend=name, variant=it.name) for it in others[:1]]
    if not found:
        have = ", ".join(f"{name}/{rung.name}" for name, op in ops.items() for rung in op.offered)
        more = sum(rung.only_named for op in ops.values() for rung in op.variants)
        rungs = f", or one of {more} rungs (python -m bench ladder)" if more else ""
        raise InputError(f"--variant: got {variant!r}; allowed all, or of {direction} one of {have}{rungs}")
    return tuple(found)


# ---------------------------------------------------------------- the truth

PEER_SLACK = 8.0
"""A peer's error may pass our budget this far before it counts as another computation than the cell's."""


BYTES_A_SCORE = 256
"""Memory of a GPU for each score that the truth of a backward holds at a time, which takes a quarter of it. The default
leaves a query at 65536 keys so few rows that reading k and v in fp64 takes most of the time."""


@dataclass(frozen=True, kw_only=True)
class Truths:
    """The truth of a cell, of the directions that it has."""

    forward: Truth | None
    backward: GradTruth | None

    def expected(self, name: str, who: object) -> Expected:
        """The truth of one result, with the budget of a Plan or a peer."""
        if name == "lse" and self.forward is not None and isinstance(who, Plan) and who.direction == "forward":
            return self.forward.of_plan(who)[1]
        found: Expected = getattr(self.backward if name in ALL_GRADS else self.forward, name)
        return found


def truth_of(cell: Cell, tensors: Tensors, *, last_entry: bool = False) -> Truths:
    """The results that contenders in a cell must compute from these tensors.

    With `last_entry` only those of the last batch entry: the one that a wrong decoding of the grid spoils, at a
    fraction of the work. Its tensors have batch size 1.
    """
    q, k, v, *sinks = tensors
    dout = cell.dout(q.device)
    q, k, v, dout = (tensor[-1:] if last_entry else tensor for tensor in (q, k, v, dout))
    # Documents as a score_mod: a block mask's truth makes N*N bools for each part of the queries.
    has_mask = cell.has_documents and not cell.is_packed
    hides = hide_others(ids_of(cell.document_lengths, q.device)) if has_mask else None
    changes = {name: it for name, it in cell.arguments(tensors).items() if name in ("softcap", "alibi_slopes")}
    score = bind_score(device=q.device, score_mod=hides, **changes)
    asked: dict[str, Any] = {"window": cell.band.window, "sinks": sinks[0] if sinks else None, "score": score}
    if cell.lists is not None:
        asked |= _lists_of(cell, q, k)
    if cell.is_packed:
        asked["packed"] = Packed((cell.cu_seqlens(q.device),) * 2, Batching("packed"))
    chunk = None
    if dout.is_cuda and not last_entry:  # a dozen processes at once ask for the last entry
        chunk = torch.cuda.get_device_properties(dout.device).total_memory // BYTES_A_SCORE
    return Truths(
        forward=Truth.of(q, k, v, **asked) if cell.direction != "bwd" else None,
        backward=GradTruth.of(q, k, v, dout, **asked, chunk=chunk) if cell.direction != "fwd" else None,
    )


def _lists_of(cell: Cell, q: torch.Tensor, k: torch.Tensor) -> dict[str, Any]:
    """The lists of a cell's block mask, and the score that says what its partial blocks hide."""
    mask = cell.arguments((q, k, k))["block_mask"]
    lists, mask_mod = read_block_mask(mask, q, k)
    if cell.is_packed:
        starts = (cell.cu_seqlens(q.device),) * 2
        lists, mask_mod = of_sequences(lists, starts), in_sequences(mask_mod, starts)
    return {"blocks": lists, "score": bind_score(device=q.device, mask_mod=mask_mod)}


def check(results: Results, truths: Truths, who: object, *, strict: bool = True) -> float:
    """The share of its budget that the worst of some results uses; Mismatch if it is too much.

    `strict` is parity's own rule. A peer may round as it likes, but must compute the same thing.
    """
    ratios = []
    for name, result in results.items():
        expected = truths.expected(name, who)
        deviation = expected.check(result, who) if strict else deviate(result, expected.truth)
        ratios.append(expected.ratio(deviation))
        if not strict and (deviation.strangers or ratios[-1] > PEER_SLACK):
            raise Mismatch(
                f"computes something else: {name} has an error of {ratios[-1]:.3g} times the budget, "
                f"{deviation.strangers} elements NaN or inf"
            )
    return max(ratios)
