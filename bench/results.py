"""Results as data: a `Row` is measured, or carries reasons, or carries an error; a `Store` keeps them in one JSON."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import torch

from bench.decode_cells import DecodeCell
from bench.matrix import Cell, InputError, rate_text
from multiattn.plan import backend as registry
from multiattn.plan.arch import Arch, detect, find_gpu
from multiattn.plan.backend import BACKENDS
from multiattn.plan.support import Reason
from multiattn.plan.toolchain import driver_version, version_of
from multiattn.tune.timing import Budget

T = TypeVar("T")
K = TypeVar("K")

SCHEMA = 5
LOST_DEVICE = "the device was lost: "
"""Starts the error of a contender after which no other could run in its process; a resumed run leaves it out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A timing: median and quartiles of one launch in ms, TFLOPS of the median, share of the stated peak.

    `error_ratio` is the worst error over its budget, of the same launch that was timed; at most 1 for ours.
    """

    time_ms: float
    low_ms: float
    high_ms: float
    rounds: int
    sample_ms: float
    """Device milliseconds that one reading was given."""
    launches: int
    host_bound: bool
    tflops: float
    peak_share: float | None
    error_ratio: float
    peak_extra_bytes: int | None = None
    """Device memory that one launch took at its peak, beside inputs and outputs; None where it was not counted."""
    tb_per_s: float | None = None
    """10^12 bytes per second of keys, values, q and out, each moved once; None but in decode."""
    copy_tb_per_s: float | None = None
    """Those that a copy within the device's memory read and wrote in the same turns; None but in decode."""
    plain_ms: float | None = None
    """The time without the cell's scores, in the same turns; None but of ours in a cell of decode that has some."""

    def __post_init__(self) -> None:
        """Keep six significant digits: more than a timing has, and what a results file holds."""
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, float):
                object.__setattr__(self, item.name, float(f"{value:.6g}"))

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        return (self.high_ms - self.low_ms) / self.time_ms


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The machine, versions and sources that a row was measured with."""

    gpu: str
    arch: str
    peak_tflops: float | None
    driver: str
    commit: str
    source: str
    """Digest of the multiattn and bench sources: what resuming goes by, also where git cannot tell the commit."""
    versions: Mapping[str, str]
    date: str

    def same_setup(self, other: Environment) -> bool:
        """Tell whether all is equal but the date and the commit, for which `source` stands."""
        return replace(self, date=other.date, commit=other.commit) == other


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The outcome of one contender in one cell: exactly one of `measured`, `reasons` and `error`."""

    cell: Cell
    contender: str
    regime: str
    environment: Environment
    command: str
    """Makes this row's run again."""
    run: str = ""
    """Shared by the rows of one cell that took turns: when they began, and a random end. Rows of two runs met different
    clocks and temperatures, so they are never compared. Empty where nothing was timed."""
    plan: Mapping[str, Any] | None = None
    """Variant, config and why of the Plan that ran; None for a peer."""
    detail: str = ""
    """How a peer is called, where that matters."""
    measured: Measured | None = None
    reasons: tuple[Reason, ...] = ()
    error: str = ""

    def __post_init__(self) -> None:
        if (self.measured is not None) + bool(self.reasons) + bool(self.error) != 1:
            raise ValueError(f"a row is measured, or carries reasons, or carries an error; got {self}")
        if self.measured is not None and not self.run:
            raise ValueError(f"a measured row names its run; got {self}")

    @property
    def key(self) -> tuple[str, str, str]:
        """Cell, contender and regime: a later row with the same key replaces this one."""
        return self.cell.key, self.contender, self.regime

    @property
    def tflops(self) -> float:
        """TFLOPS; 0 where nothing was timed."""
        return self.measured.tflops if self.measured is not None else 0.0

    @property
    def figure(self) -> str:
        """TFLOPS for a table; ``refused`` or ``error``, whose text is listed below the table."""
        if self.measured is None:
            return "refused" if self.reasons else "error"
        return rate_text(self.tflops) + (" (host-bound)" if self.measured.host_bound else "")

    @property
    def text(self) -> str:
        """One line: TFLOPS, or why there are none."""
        if self.measured is not None:
            return f"{rate_text(self.measured.tflops)} TFLOPS"
        return "; ".join(map(str, self.reasons)) or self.error.strip().splitlines()[0]


@dataclass(slots=True)
class Store:
    """The rows of one suite on one GPU, written after every cell: a run that dies loses one cell at most."""

    path: Path
    suite: str
    rows: dict[tuple[str, str, str], Row] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = {row.key: row for row in load(self.path)} if self.path.exists() else {}

    def kept(self, cell: Cell, contender: str, regime: str, setup: Environment) -> Row | None:
        """The row of a contender in a cell, if this very setup made it."""
        row = self.rows.get((cell.key, contender, regime))
        return row if row is not None and row.environment.same_setup(setup) else None

    def finished(self, cell: Cell, contenders: Sequence[str], regime: str, setup: Environment, budget: Budget) -> bool:
        """Tell whether every contender has its row of this cell from this setup: timed in one run, with `budget` or
        more, or refused. An error is tried again, unless it took the device down.
        """
        rows = [row for name in contenders if (row := self.kept(cell, name, regime, setup)) is not None]
        timed = [(row.run, row.measured) for row in rows if row.measured is not None]
        return (
            len(rows) == len(contenders)
            and len({run for run, _ in timed}) <= 1
            and all(not row.error or row.error.startswith(LOST_DEVICE) for row in rows)
            and all(it.rounds >= budget.rounds and it.sample_ms >= budget.sample_ms for _, it in timed)
        )

    def add(self, rows: Iterable[Row]) -> None:
        """Take rows in place of older ones, and write the file."""
        for row in rows:
            self.rows[row.key] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(f".{os.getpid()}.part")
        partial.write_text(dumps(self.suite, self.rows.values()))
        partial.replace(self.path)


def pack(records: Sequence[Mapping[str, Any]], shared: Iterable[str]) -> dict[str, Any]:
    """Records of the same fields as a table: `columns`, `rows`, and in `lists` each value of the fields `shared` once.

    Of these a row has the number in the list, or None.
    """
    numbers: dict[str, dict[str, int]] = {name: {} for name in shared}

    def told(name: str, value: Any) -> Any:
        its = numbers.get(name)
        return value if its is None or value is None else its.setdefault(json.dumps(value), len(its))

    columns = list(records[0]) if records else []
    rows = [[told(name, it[name]) for name in columns] for it in records]
    lists = {name: list(map(json.loads, its)) for name, its in numbers.items()}
    return {"lists": lists, "columns": columns, "rows": rows}


_TIMES = tuple(it.name for it in fields(Measured))
_SHARED = ("environment", "command", "run", "cell", "plan", "reasons")


def dumps(suite: str, rows: Iterable[Row]) -> str:
    """The JSON of a results file: once each of what several rows share, and a row a line, by the names in `columns`."""

    def values(row: Row) -> dict[str, Any]:
        return {
            "cell": row.cell.as_dict(),
            "contender": row.contender,
            "regime": row.regime,
            "environment": asdict(row.environment),
            "command": row.command or None,
            "run": row.run or None,
            "plan": row.plan,
            "reasons": list(map(asdict, row.reasons)) or None,
            "error": row.error or None,
            "detail": row.detail or None,
            **{name: getattr(row.measured, name, None) for name in _TIMES},
        }

    found = list(map(values, rows))
    used = [name for name in (found[0] if found else ()) if any(it[name] is not None for it in found)]
    packed = pack([{name: it[name] for name in used} for it in found], _SHARED)
    lists = {name if name == "reasons" else f"{name}s": its for name, its in packed.pop("lists").items()}
    return dump({"schema": SCHEMA, "suite": suite, **lists, **packed})


def dump(data: Mapping[str, Any]) -> str:
    """JSON with a line for each item of a list, and one for all values that are no lists."""
    head = ", ".join(f"{json.dumps(name)}: {json.dumps(it)}" for name, it in data.items() if not isinstance(it, list))
    lists = ((name, ",\n  ".join(map(_line, it))) for name, it in data.items() if isinstance(it, list))
    return "{" + ",\n ".join([head, *(f'"{name}": [\n  {lines}\n ]' for name, lines in lists)]) + "}\n"


def _line(item: Any) -> str:
    """An item of a list; a row, which is a list itself, without spaces."""
    return json.dumps(item, separators=(",", ":") if isinstance(item, list) else None)


def load(path: Path) -> list[Row]:
    """The rows of a results file. InputError, naming the file, for one that is not ours."""

    def rows(data: dict[str, Any]) -> list[Row]:
        setups: list[Any] = [Environment(**it) for it in data["environments"]]
        cells = [(DecodeCell if "queries" in it else Cell)(**it) for it in data["cells"]]
        reasons = [tuple(Reason(**reason) for reason in its) for its in data["reasons"]]
        lists = {"cell": cells, "environment": setups, "reasons": reasons}
        lists |= {"command": data["commands"], "run": data["runs"], "plan": data["plans"]}

        def row_of(values: Sequence[Any]) -> Row:
            told = {name: it for name, it in zip(data["columns"], values, strict=True) if it is not None}
            row = {name: lists[name][it] if name in lists else it for name, it in told.items()}
            times = {name: row.pop(name, None) for name in _TIMES}
            return Row(**row, measured=Measured(**times) if times["time_ms"] is not None else None)

        return list(map(row_of, data["rows"]))

    return read(path, SCHEMA, rows)


def read(path: Path, schema: int, parse: Callable[[dict[str, Any]], T]) -> T:
    """The result of `parse` on a JSON file of ours. InputError, naming the file, for another one or none."""
    what = f"a file of schema {schema} that python -m bench wrote"
    try:
        data = json.loads(path.read_text())
        if not isinstance(data, dict) or data.get("schema") != schema:
            raise ValueError(f"its schema is {data.get('schema') if isinstance(data, dict) else None}")
        return parse(data)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise InputError(f"{path}: not {what}: {error}") from None


def is_ours(contender: str) -> bool:
    """Tell whether a contender is a backend, or a variant of one."""
    return contender.partition("/")[0] in BACKENDS


def one_run(rows: Iterable[Row]) -> list[Row]:
    """The rows of one run for each GPU, cell and regime, so that a line of a table never mixes runs.

    The newest run in which several contenders took turns counts, or the newest where no run has several. Rows without
    a run (refused before anybody was timed) stay, unless they are of another setup than the run.
    """
    places = grouped(rows, lambda row: (row.environment.gpu, row.cell.key, row.regime))
    return [row for members in places.values() for row in _newest(members)]


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by their keys, in the order in which these come."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def newest(path: Path) -> list[Row]:
    """`one_run` of a results file; nothing where there is none."""
    return one_run(load(path)) if path.exists() else []


def _newest(rows: Sequence[Row]) -> list[Row]:
    runs = grouped((row for row in rows if row.measured is not None), lambda row: row.run)
    if not runs:
        return list(rows)
    complete = [run for run, timed in runs.items() if len(timed) > 1]
    newest = max(complete or runs)  # a run's name begins with its time
    setup = runs[newest][0].environment
    return [row for row in rows if row.run == newest or (not row.run and row.environment.same_setup(setup))]


# ---------------------------------------------------------------- environment

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
NO_GPU = Reason(code="gpu", got="none on this machine", allowed="an NVIDIA GPU", hint="compiling needs none")
"""The reason of every timing where there is nothing to time on."""

PEER_PACKAGES = (
    *("flash-attn", "flash-attn-3", "flash-attn3-jax", "flash-attn-4", "tilegym"),
    *("flashinfer-python", "nvidia-cudnn-frontend", "vllm"),
)
_PEERS = ("peers.py", "peers_cute.py", "peers_cudnn.py", "peers_jax.py", "peers_decode.py", "xla_ffi.py")
TIMED_WITH = ("matrix.py", "decode_cells.py", "features.py", "block_lists.py", "contenders.py", *_PEERS)


def gpu_arch() -> Arch | None:
    """The arch of the current GPU, or None where there is none."""
    return detect(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else None


def environment() -> Environment:
    """This machine, this checkout, now."""
    arch = gpu_arch()
    name = torch.cuda.get_device_name() if arch is not None else "none"
    gpu = find_gpu(name)
    return Environment(
        gpu=name,
        arch=arch.name if arch is not None else "none",
        peak_tflops=gpu.tflops if gpu is not None else None,
        driver=driver_version() if arch is not None else "unknown",
        commit=_commit(),
        source=source_digest(),
        versions=versions(),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    )


def results_dir(gpu: str) -> Path:
    """The folder bench/results/<gpu>, which is committed; out/bench/no-gpu where nothing was measured."""
    if gpu == "none":
        return ROOT / "out" / "bench" / "no-gpu"
    return RESULTS / re.sub(r"[^a-z0-9]+", "-", short_name(gpu).lower()).strip("-")


def short_name(gpu: str) -> str:
    """``H100`` of all that the driver calls it."""
    known = find_gpu(gpu)
    return known.name if known is not None else gpu.removeprefix("NVIDIA ")


def versions() -> Mapping[str, str]:
    """Versions of Python, torch, what the backends stand on, and the peers that are installed."""
    found = {"python": ".".join(map(str, sys.version_info[:3])), "torch": torch.__version__}
    if torch.version.cuda is not None and torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    for name in BACKENDS:
        told = registry.get(name).versions().items()
        found |= {key: it for key, it in told if it is not None and not Path(it).is_absolute()}  # where a tool is
    found |= {package: it for package in PEER_PACKAGES if (it := version_of(package)) is not None}
    return dict(sorted(found.items()))


def source_digest() -> str:
    """Twelve hex digits over every source file of multiattn and of the timing modules here."""
    digest = hashlib.sha256()
    files = [path for path in (ROOT / "multiattn").rglob("*") if path.suffix in {".py", ".cuh", ".h", ".cu", ".cpp"}]
    for path in sorted([*files, *(ROOT / "bench" / name for name in TIMED_WITH)]):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _commit() -> str:
    """Short hash, with `+` where tracked sources differ from it; MULTIATTN_COMMIT speaks for a copy without .git."""
    if given := os.environ.get("MULTIATTN_COMMIT"):
        return given
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--", "multiattn")
    return f"{commit}+" if commit and changed else commit or "unknown"


def _output(*command: str) -> str | None:
    """The output of a tool, or None where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.strip() if done.returncode == 0 else None
