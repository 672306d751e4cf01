"""A backend whose configs have scripted times and results, for tests of tuning: nothing here is slow or on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from multiattn.inspect.pool import Outcome
from multiattn.plan import backend as registry
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import get, make_plan
from multiattn.plan.config import Config, Rule
from multiattn.plan.support import Reason
from multiattn.plan.tuning import SCHEMA, Sizes, TimedWay, TunedBackend, TunedCell, Tuning
from multiattn.problem import Problem
from multiattn.run import tuning as kept
from multiattn.run.tuning import version
from multiattn.tune import check
from multiattn.tune.candidates import candidates_of
from multiattn.tune.measure import Bench
from multiattn.tune.timing import Sample

GPU = "NVIDIA Test"
LAYER = Problem.contiguous(batch=2, heads_q=16, seq_q=1024, head_dim=128, causal=True)
PROBLEM = Problem.contiguous(batch=2, heads_q=4, heads_kv=2, seq_q=48, head_dim=16, causal=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice(Config):
    """A config of the fake backend."""


def choice(tile_m: int) -> Choice:
    """Its config with such tiles."""
    return Choice(tile_m=tile_m, tile_n=16)


class FakeGpu:
    """The fake backend, and a clock that says what a test scripted for its variants and tiles.

    Tiles in `wrong` compute something else, those in `wrong_elsewhere` at other lengths than `PROBLEM`'s, those in
    `unwritten` leave elements unwritten, those in `broken` raise.
    """

    def __init__(self, times: dict[tuple[str, int], float]) -> None:
        self.times = times
        self.wrong: tuple[int, ...] = ()
        self.wrong_elsewhere: tuple[int, ...] = ()
        self.unwritten: tuple[int, ...] = ()
        self.broken: tuple[int, ...] = ()
        self.launched: list[tuple[str, int]] = []

    def backend(self, name: str = "cuda") -> registry.Backend:
        """The backend, with two variants and a rule for tiles of 16."""
        eager = registry.get(registry.REFERENCE)
        rule = Rule(arches=("cpu",), config=choice(16), why="bundled evidence")

        def candidates(variant, problem, arch):
            return [choice(it) for name, it in self.times if name == variant.name]

        def op(own: registry.Op) -> registry.Op:
            first = replace(own.variants[0], name="first", rules=(rule,), config_type=Choice)
            second = replace(first, name="second", parent=None, deterministic=False)
            return replace(own, variants=(first, second), prepare=self._prepare(own), candidates=candidates)

        return replace(eager, name=name, forward=op(eager.forward), backward=op(eager.backward))

    def _prepare(self, own: registry.Op):
        def prepare(plan):
            if plan.config.tile_m in self.broken:
                raise RuntimeError("it does not compile\nat all")
            launch = own.prepare(plan)
            names = ("out", "lse") if plan.direction == "forward" else ("dq", "dk", "dv")

            def run(operands) -> None:
                self.launched.append((plan.variant, plan.config.tile_m))
                launch(operands)
                is_elsewhere = plan.problem.seq_kv != PROBLEM.seq_kv
                if plan.config.tile_m in self.wrong or (is_elsewhere and plan.config.tile_m in self.wrong_elsewhere):
                    getattr(operands, names[0]).mul_(1.1)
                if plan.config.tile_m in self.unwritten:
                    getattr(operands, names[0])[0, 0, 0, 0] = torch.nan

            return run

        return prepare

    def bench(self) -> Bench:
        """The GPU as `multiattn.tune` is given it."""
        return Bench(gpu=GPU, arch=ARCHS["cpu"], device="cpu", jobs=1, clock=self)

    def device(self, call, launches: int) -> Sample:
        """As `multiattn.tune.timing.CudaClock`."""
        call()
        return Sample(time_ms=self.times[self.launched[-1]])


def way(variant: str, config: object, tflops: float, shown: str = "") -> TimedWay:
    """A timed way of so many TFLOPS."""
    times = {"time_ms": 100 / tflops, "tflops": float(tflops), "spread": 0.01}
    return TimedWay(variant=variant, config=config, shown=shown, **times)


def cell(problem: Problem, backends: dict[str, TunedBackend], direction: registry.Direction = "forward") -> TunedCell:
    """A measured cell."""
    setup = {"date": "2026-11-26", "driver": "580.0", "versions": {"torch": "2.11"}, "seconds": 2.0}
    return TunedCell(direction=direction, sizes=Sizes.of(problem), backends=backends, **setup)


def tuning(*cells: TunedCell, gpu: str = GPU, arch: str = "sm90") -> Tuning:
    """The measurements of a GPU."""
    return Tuning(schema=SCHEMA, multiattn=version(), gpu=gpu, arch=arch, cells=cells)


def timed(*ways: TimedWay, bundled: TimedWay | None = None) -> TunedBackend:
    """A backend that was timed in `ways`."""
    return TunedBackend(ways=ways, bundled=() if bundled is None else (bundled,), candidates=7, failed={})


def other_config():
    """A config of CUDA's wgmma that is not the rule's, and the rule's Plan."""
    bundled = make_plan(get("cuda"), LAYER, ARCHS["sm90"], probe=False)
    return next(it.config for it in candidates_of("cuda", LAYER, ARCHS["sm90"], "forward", most=None)
                if it.variant == bundled.variant and it.config is not None), bundled  # fmt: skip


# ---------------------------------------------------------------- for fixtures


def run_here(function, items, **_):
    """`run_isolated` in this process."""
    yield from (outcome_of(function, item) for item in items)


def outcome_of(function, item):
    try:
        return Outcome(item=item, result=function(item))
    except Exception as error:
        return Outcome(item=item, error=f"{type(error).__name__}: {error}")


def install_gpu(monkeypatch):
    """A fake backend, cuda, on a fake GPU; the other backends are missing."""
    fake = FakeGpu({("first", 16): 1.0, ("first", 32): 0.8, ("first", 64): 0.5, ("second", 16): 2.0})
    real = registry.get
    absent = (Reason(code="package", got="no cuda-tile", allowed="1.7"),)
    made = {"cuda": fake.backend(), "cutile": replace(real("cutile"), probe=lambda arch: absent)}
    monkeypatch.setattr(registry, "get", lambda name: made.get(name) or real(name))
    monkeypatch.setattr(check, "run_isolated", run_here)
    monkeypatch.setattr(check, "RAGGED", ((40, 2),))
    check._truth.cache_clear()
    yield fake
    check._truth.cache_clear()


def install_folder(monkeypatch, tmp_path):
    """The user's own cache, with what is tuned turned on, on a GPU of a known name."""
    monkeypatch.setenv("MULTIATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv(kept.VARIABLE)
    monkeypatch.setattr(kept, "gpu_name", lambda index: GPU)
    kept._kept.cache_clear()
    kept._tell_once.cache_clear()
    yield tmp_path / "tuned"
    kept._kept.cache_clear()
    kept._tell_once.cache_clear()
