"""FlashAttention's own tests on this package's functions: their cases, their reference, their tolerances.

    python -m parity flash-attention CHECKOUT/tests/test_flash_attn.py      # FlashAttention 2
    python -m parity flash-attention CHECKOUT/hopper/test_flash_attn.py     # FlashAttention 3; test_util.py beside it

A checkout of github.com/Dao-AILab/flash-attention has the files. Nothing else of it is read, and FlashAttention need
not be installed. The test file is copied to a temporary folder and run there by pytest, which finds stand-ins for the
modules that it imports: their functions are those of `multiattn.integrations.flash_attn`.

The parameters of its tests multiply to more than 100,000 cases. Those that need what is refused here (dropout, fp8,
qv, used lengths, rotary embedding) are left out, and some of the others are chosen, the same each time. On a CPU the
device is replaced in the copy, and only small cases are chosen. A case that is refused nonetheless counts as skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tabulate import tabulate

from multiattn.inspect.options import count
from multiattn.plan.backend import BACKENDS, REFERENCE

ROOT = Path(__file__).parent.parent
OUTCOMES = ("passed", "failed", "skipped")
NOT_HERE = ("splitkv", "num_splits", "combine", "table_bounds", "generator", "bw_compatibility")
"""Parts of names of tests: of splits in plain calls, of FlashAttention's extension module, and of an error for lengths
that a table has no room for, which nobody reads on the host here."""

REPEATED = ("race_condition", "deterministic")
"""Parts of names of tests that repeat a call up to 250 times, which tells nothing on a CPU."""

ON_CPU = {
    'torch.cuda.get_device_capability("cuda")': "(9, 0)",
    '"cuda"': '"cpu"',
    'parametrize("d", [128])': 'parametrize("d", [64])',
}
"""Replaced in the copy where there is no GPU; the tests of caches have one head_dim, which is too large for a CPU."""

OF_FA3 = {
    "[128, d] if d > 128 and d <= 192 else ([256, 512, d] if d <= 64 else [d])": "[d]",
    "[torch.randint(1, seqlen_k * 2, (1,)).item(), 0]": "[0]",
    "seqused_q=seqused_q": "seqused_q=seqused_q if add_unused_qkv else None",
    "seqused_k=seqused_k": "seqused_k=seqused_k if add_unused_qkv else None",
    "torch.empty(70 * 1024 ** 3,": "torch.empty(1024 ** 3,",
}
"""Replaced in FlashAttention 3's tests, whose every case needs what is refused: they loop over head_dims of v and over
chunks, and give used lengths also where all are used. And 70 GiB that one test takes only to fill the memory are for a
process that has a GPU to itself."""

FA3_SETTINGS = {f"FLASH_ATTENTION_DISABLE_{name}": "TRUE" for name in ("FP8", "PACKGQA")}
"""FlashAttention 3's own switches: off is what is refused, and a hint, which changes nothing here."""

GRACE_S = 120
"""A case that was begun in time may take this long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How one case ended."""

    test: str
    case: str
    outcome: str
    reason: str
    seconds: float


def main(arguments: Sequence[str]) -> int:
    """Run the tests of a file, print tables; 0 where some passed and none failed, else 1."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not options.path.is_file():
        parser.error(f"no such file: {options.path}")
    small = options.device == "cpu"
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_tests(options.path, Path(folder), on_cpu=small)
        outcomes, left_out, problems = _run(copy, options, small=small)
    print(f"\n{options.path}, backend {options.backend}, {_device(options.device)}\n")
    print(summary(outcomes))
    print("\n" + _counted("left out", left_out))
    for outcome in ("skipped", "failed"):
        reasons = Counter(it.reason for it in outcomes if it.outcome == outcome)
        if reasons:
            print("\n" + _counted(outcome, reasons))
    for failed in [it for it in outcomes if it.outcome == "failed"]:
        print(f"failed: {failed.case}")
    print("".join(f"\n{problem}" for problem in problems))
    counts = Counter(it.outcome for it in outcomes)
    print(", ".join(f"{counts[it]} {it}" for it in OUTCOMES))
    return int(bool(counts["failed"] or problems or not counts["passed"]))


def copy_tests(path: Path, folder: Path, *, on_cpu: bool) -> Path:
    """A copy of a test file that runs on this device, with FlashAttention 3's helper beside it."""
    text = path.read_text()
    replaced: dict[str, str] = {}
    if "from flash_attn_interface import" in text:
        replaced |= OF_FA3
        helper = path.with_name("test_util.py")
        (folder / helper.name).write_text(helper.read_text())
    replaced |= ON_CPU if on_cpu else {}
    for old, new in replaced.items():
        if old not in text and old in OF_FA3:
            raise ValueError(f"{path}: got another version of FlashAttention 3's tests; allowed one that has: {old}")
        text = text.replace(old, new)
    (folder / "pytest.ini").write_text("[pytest]\n")
    copy = folder / path.name
    copy.write_text(text)
    return copy


def _run(copy: Path, options: argparse.Namespace, *, small: bool) -> tuple[list[Outcome], Counter[str], list[str]]:
    """How each case ended, how many were left out by reason, and what is wrong with processes that did not end well."""
    deadline = time.time() + options.seconds
    names = (*NOT_HERE, *(REPEATED if small else ()))
    chosen = f"not ({' or '.join(names)})" + (f" and ({options.only})" if options.only else "")
    command = [sys.executable, "-m", "pytest", copy.name, "-q", "--tb=short", "-p", "parity.flash_attention_plugin"]
    command += ["-p", "no:cacheprovider", "-p", "no:benchmark", "-p", "no:xdist", "-k", chosen, "--rootdir=."]
    paths = (str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]))
    environment = os.environ | FA3_SETTINGS | {"PYTHONPATH": os.pathsep.join(paths)}
    started = []
    for shard in range(options.jobs):
        settings = {
            "backend": options.backend,
            "each": options.each,
            "small": small,
            "without": names,
            "shard": shard,
            "shards": options.jobs,
            "deadline": deadline,
            "results": str(copy.with_name(f"results_{shard}.jsonl")),
        }
        log = copy.with_name(f"log_{shard}.txt")
        mine = [*command, "--flash-attention", json.dumps(settings)]
        with log.open("w") as out:
            process = subprocess.Popen(mine, cwd=copy.parent, env=environment, stdout=out, stderr=subprocess.STDOUT)
        started.append((process, log, Path(settings["results"])))
    problems, lines = [], []
    for shard, (process, log, results) in enumerate(started):
        try:
            status: int | str = process.wait(timeout=max(deadline + GRACE_S - time.time(), 0))
        except subprocess.TimeoutExpired:
            process.kill()
            status = "killed, as it did not end"
        lines += [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
        if status not in (0, 1, 5):  # 5: no case left for this process
            problems.append(f"process {shard}: {status}\n" + "\n".join(log.read_text().splitlines()[-30:]))
        elif options.verbose:
            print(log.read_text())
    left_out: Counter[str] = Counter()
    for line in lines:
        left_out.update(line.get("left_out", {}))
    outcomes = [Outcome(**line) for line in lines if "outcome" in line]
    return outcomes, left_out, problems


def summary(outcomes: Iterable[Outcome]) -> str:
    """A line for each test: how many cases ended how, and the seconds they took."""
    rows: dict[str, Counter[str]] = {}
    seconds: Counter[str] = Counter()
    for it in outcomes:
        rows.setdefault(it.test, Counter())[it.outcome] += 1
        seconds[it.test] += it.seconds  # type: ignore[assignment]  # a Counter of floats
    lines = [(test, *(found[it] for it in OUTCOMES), f"{seconds[test]:.0f}") for test, found in sorted(rows.items())]
    return tabulate(lines, headers=("test", *OUTCOMES, "s"))


def _counted(what: str, reasons: Counter[str]) -> str:
    lines = [(number, reason.splitlines()[0][:200] if reason else "") for reason, number in reasons.most_common()]
    return tabulate(lines, headers=("cases", f"{what}, as"))


def _device(name: str) -> str:
    return torch.cuda.get_device_name() if name == "cuda" else name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m parity flash-attention", description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="tests/test_flash_attn.py or hopper/test_flash_attn.py of a checkout")
    names = ("auto", REFERENCE, *BACKENDS)
    parser.add_argument("--backend", choices=names, default="auto", help="default: %(default)s")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default, help="default here: %(default)s")
    parser.add_argument("--each", type=count, default=50, help="cases chosen of each test (%(default)s)")
    parser.add_argument("--only", metavar="EXPR", help="tests to run, as pytest's -k has it; default all")
    parser.add_argument("--seconds", type=float, default=480, help="no case begins after these (%(default)s)")
    parser.add_argument("--jobs", type=count, default=1, help="processes (%(default)s)")
    parser.add_argument("--verbose", action="store_true", help="print pytest's own output, too")
    return parser
