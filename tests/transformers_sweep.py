"""The sweep over transformers' models: a verdict on each cell, multiattn beside eager attention.

Run it as ``python tests/transformers_sweep.py [class ...]`` for a table; without a name it takes all classes.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tabulate
import torch
import transformers
import transformers_models as models
from transformers import AttentionInterface
from transformers_cells import Subject, Tensors

from multiattn.integrations.transformers import register

TOLERANCE = 1e-4
"""An error's share of the largest value; in float32, so that a fault has no rounding to hide in."""
HUGE = 1e30
"""Larger values, such as a logit that a model forbids, count as none: every error is small beside them."""
SECONDS = 40
"""How long a cell may take."""

FAULTS = ("WRONG", "unclear error")
NOTED = ("not told", "as sdpa, not as eager", "too slow")
VERDICTS = ("right", "refused", "eager cannot", "never called", "no way in", *NOTED, *FAULTS)
"""
- right: as eager attention, within `TOLERANCE`, and `attend` was called;
- refused: by an error of multiattn that names what;
- eager cannot: the cell has no meaning for this model, or it needs a package that is not there;
- never called: the model does not call the interface, so our name changes nothing;
- no way in: the model has a table of implementations of its own, and says that our name is not in it;
- not told: packed sequences of which no call of attention is told; eager attention mixes them, too;
- as sdpa, not as eager: eager attention is what differs;
- too slow: it took longer than `SECONDS`;
- WRONG: silently; unclear error: one that names nothing.
"""

AS_SDPA = {
    ("DiffusionGemmaForBlockDiffusion", "decoder padding"): "its mask is of the cache; some windows have no key",
    ("MoonshineStreamingForConditionalGeneration", "right padding"): "all is padding; eager takes the mean of no key",
    ("SeamlessM4Tv2ForSpeechToText", "right padding"): "it adds a mask of bools to scores, as 0 and 1",
}
"""Cells in which eager attention is what is wrong, with the reason."""

TOLD = {
    "packed by position_ids": {"position_ids"},
    "packed by cu_seq_lens alone": {"cu_seq_lens_q"},
    "packed by cu_seq_lens": {"position_ids", "cu_seq_lens_q"},
}
"""Keywords that tell attention of packed sequences."""

Cells = dict[str, tuple[str, str]]
"""The verdict of each cell, and a word on why."""


class TimeLimitError(BaseException):
    """A cell took too long; not an Exception, for models to catch none."""


class Spy:
    """Counts the calls of `attend`, and keeps by what it was told of packed sequences."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        self.attend, self.calls, self.told = attend, 0, set[str]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        positions = kwargs.get("position_ids")
        is_told = positions is not None and positions.ndim == 2  # others have a row for each axis of an image
        self.told |= {"position_ids"} if is_told else set()
        self.told |= {"cu_seq_lens_q"} if kwargs.get("cu_seq_lens_q") is not None else set()
        return self.attend(*args, **kwargs)


def apart(ours: Tensors, truth: Tensors) -> float:
    """The largest error, as a share of the largest value of its tensor."""
    if len(ours) != len(truth):
        return float("inf")
    worst = 0.0
    for (a, rows), (b, _) in zip(ours, truth, strict=True):
        if a.shape != b.shape:
            return float("inf")
        if rows is not None:
            a, b = a[rows], b[rows]
        a, b = (it.masked_fill(it.abs() > HUGE, 0.0) for it in (a, b))
        if b.numel():
            error = (a - b).abs().max() / b.abs().max().clamp(min=1e-9)
            worst = max(worst, error.item() if error.isfinite() else float("inf"))
    return worst


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimitError in what takes longer."""

    def stop(*_: Any) -> None:
        raise TimeLimitError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def is_refusal(error: BaseException) -> bool:
    """True if an error says by name what is not done, and comes from multiattn or from the choice of it."""
    if not isinstance(error, (NotImplementedError, ValueError, TypeError)):
        return False
    ours = any("/multiattn/" in it.filename for it in traceback.extract_tb(error.__traceback__)[-3:])
    return (ours or "multiattn" in str(error)) and len(str(error)) > 20


def judge(
    subject: Subject, cell: str, run: Any, truths: list[Any], changes: dict[str, Any], spy: Spy
) -> tuple[str, str]:
    """The verdict of a cell, and a word on why."""
    expected, failure = [], ""
    for it in truths:
        try:
            found = it(subject.build("eager", **changes))
            if found and all(value.isfinite().all() for value, _ in found):
                expected.append(found)
        except Exception as error:
            failure = f"{type(error).__name__}: {str(error)[:150]}"
    if not expected:
        return "eager cannot", failure
    spy.calls, spy.told = 0, set()
    try:
        ours = run(subject.build("multiattn", **changes))
    except Exception as error:
        said = f"{type(error).__name__}: {str(error)[:300]}"
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f" ({os.path.basename(frame.filename)}:{frame.lineno})"
        if isinstance(error, KeyError) and str(error) == "'multiattn'":  # a model's own table of implementations
            return "no way in", said + where
        if is_refusal(error):
            return "refused", said + where
        with contextlib.suppress(Exception):
            run(subject.build("eager", **changes))
            return "unclear error", said + where
        return "eager cannot", said + where
    calls, told = spy.calls, set(spy.told)
    off = min(apart(ours, it) for it in expected)
    if not calls:
        return "never called", f"{off:.1e}"
    if off <= TOLERANCE:
        return "right", f"{off:.1e}"
    said = f"off by {off:.1e}"
    noise = 0.0
    with contextlib.suppress(Exception):
        noise = max(apart(_shaken(truths[0], subject, changes, it), expected[0]) for it in range(3))
    said += f", noise {noise:.1e}"
    if off <= 4 * noise < float("inf"):
        return "right", said
    same: dict[str, float] = {}
    for name in ("eager", "sdpa"):
        with contextlib.suppress(Exception):
            other = run(subject.build(name, **changes))
            same[name] = apart(ours, other)
            said += f"; {name} off by {min(apart(other, it) for it in expected):.1e}, from ours {same[name]:.1e}"
    if cell.startswith("packed") and not told & TOLD[cell] and same.get("eager", 1.0) <= TOLERANCE:
        return "not told", said
    if same.get("sdpa", 1.0) <= TOLERANCE and (subject.kind.__name__, cell) in AS_SDPA:
        return "as sdpa, not as eager", said
    return "WRONG", said


def _shaken(run: Any, subject: Subject, changes: dict[str, Any], times: int) -> Any:
    """Results of eager attention where each weight is off by about its last bit."""
    model = subject.build("eager", **changes)
    generator = torch.Generator().manual_seed(times)
    with torch.no_grad():
        for it in model.parameters():
            it.mul_(1 + 1e-7 * torch.randn(it.shape, generator=generator))
    return run(model)


_subject = functools.lru_cache(maxsize=1)(Subject)


def sweep(name: str, only: tuple[str, ...] = (), plant: Callable[..., Any] | None = None) -> Cells:
    """The verdict of each cell of a class; `plant` makes a fault of `attend`."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    register()
    attend = AttentionInterface()["multiattn"]
    spy = Spy(attend if plant is None else plant(attend))
    AttentionInterface.register("multiattn", spy)
    try:
        with limit(SECONDS):
            subject = _subject(name)
    except (Exception, TimeLimitError) as error:
        return {"made small": ("no", f"{type(error).__name__}: {str(error)[:500]}")}
    found = {"made small": ("yes", " ".join(f"{it}{list(of.shape)}" for it, of in subject.inputs.items()))}
    for cell, run, truths, changes in subject.cells():
        if only and cell not in only:
            continue
        try:
            with limit(SECONDS):
                found[cell] = judge(subject, cell, run, truths, changes, spy)
        except TimeLimitError:
            found[cell] = ("too slow", "")
    register()
    return found


def _timed(name: str, **given: Any) -> tuple[str, Cells, float]:
    start = time.monotonic()
    return name, sweep(name, **given), time.monotonic() - start


def sweep_all(names: Sequence[str], jobs: int, **given: Any) -> Iterator[tuple[str, Cells, float]]:
    """The cells of each class, and the seconds that they took; the other arguments are those of `sweep`."""
    with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(functools.partial(_timed, **given), names)


def faults(cells: Cells) -> dict[str, str]:
    """The cells that may not be."""
    return {cell: f"{verdict}: {why}" for cell, (verdict, why) in cells.items() if verdict in FAULTS}


def counts(found: dict[str, Cells]) -> collections.Counter[tuple[str, str]]:
    """How many classes have each verdict in each cell."""
    return collections.Counter((cell, verdict) for cells in found.values() for cell, (verdict, _) in cells.items())


def table(found: dict[str, Cells]) -> str:
    """Cells by verdicts."""
    count = counts(found)
    verdicts = [it for it in ("yes", "no", *VERDICTS) if any(verdict == it for _, verdict in count)]
    rows = [[cell, *(count[cell, it] or "" for it in verdicts)] for cell in dict.fromkeys(cell for cell, _ in count)]
    return tabulate.tabulate(rows, headers=["", *verdicts], tablefmt="github")


def main() -> None:
    """Print the verdicts of the classes that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="classes of transformers; all where none is named")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    found: dict[str, Cells] = {}
    for name, cells, seconds in sweep_all(args.names or list(models.classes()), args.jobs):
        found[name] = cells
        told = {cell: verdict for cell, (verdict, _) in cells.items()}
        print(f"{name}: {seconds:.1f} s, {dict(collections.Counter(told.values()))}", flush=True)
        for cell, (verdict, why) in cells.items():
            if args.names or verdict in (*FAULTS, *NOTED):
                print(f"    {cell}: {verdict}: {why}", flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
