"""The manifest of a folder of kernels: written by one process at a time, checked before anything in it is believed.

An entry carries a digest of itself, as it does of its cubin, and of the code that makes a launch: how a kernel takes
its arguments stands in no cubin, so another version of that code could hand it the wrong ones without a word.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import json
import os
import threading
import time
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

import multiattn
from multiattn.plan import abi
from multiattn.plan import backend as registry
from multiattn.plan.arch import Arch, by_name
from multiattn.plan.backend import Plan, Variant, find_variant, plan_variant
from multiattn.plan.config import Config
from multiattn.problem import DTYPES, VECTOR_BYTES, Problem, Strides

SCHEMA = 2
"""Of the manifest; another number is another format."""

MANIFEST = "manifest.json"

_LOCK, _HELD = "manifest.lock", "manifest.held"  # the second is gone when nobody writes: it works without fcntl
_WAIT_S, _RETRY_S = 60.0, 0.005
_SEAL = "entry_sha256"
_DIGITS = 12

_ROOT = Path(multiattn.__file__).parent
_HOST_SOURCES = (
    "plan/abi.py",
    "plan/columns.py",
    "plan/schedule.py",
    "problem.py",
    "run/arguments.py",
)  # beside a backend's own


# ---------------------------------------------------------------- the file


def read(folder: Path) -> list[dict[str, Any]]:
    """The entries of a folder's manifest; ValueError for one that is not there, is no JSON or has another schema."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; allowed a folder that `python -m multiattn compile` wrote") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no JSON ({error})") from None
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if type(schema) is not int or schema != SCHEMA:
        raise ValueError(f"{path}: schema: got {schema!r}; allowed {SCHEMA}: emit into a new folder")
    entries = manifest.get("kernels")
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in entries
    ):
        raise ValueError(f"{path}: kernels: got {type(entries).__name__}; allowed a list of records with names")
    return entries


def update(folder: Path, entries: Sequence[Mapping[str, Any]]) -> Path:
    """Put entries into a folder's manifest, over those of the same names; its path.

    One at a time, whichever threads and processes write to the folder: a reader sees all of an update or nothing.
    ValueError for a manifest that cannot be read.
    """
    path = folder / MANIFEST
    draft = folder / f"{MANIFEST}.{os.getpid()}.{threading.get_ident()}.new"
    names = {entry["name"] for entry in entries}
    with _locked(folder):
        others = [entry for entry in read(folder) if entry["name"] not in names] if path.exists() else []
        try:
            draft.write_text(json.dumps({"schema": SCHEMA, "kernels": [*others, *entries]}, indent=2) + "\n")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    return path


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Nobody else is in here for this folder: no thread, no process of this machine."""
    if fcntl is None:
        with _held(folder / _HELD):
            yield
        return
    with (folder / _LOCK).open("w") as file:  # left there: whoever unlinked it would let in two
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """As `_locked`, by a file that only one can make; TimeoutError where it stays, after a crash as a rule."""
    until = time.monotonic() + _WAIT_S
    while True:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            break
        except (FileExistsError, PermissionError):  # Windows has the second for a file that is about to go
            if time.monotonic() > until:
                raise TimeoutError(f"{path}: there for {_WAIT_S:.0f} s: delete it if nobody writes here") from None
            time.sleep(_RETRY_S)
    try:
        yield
    finally:
        path.unlink()


# ---------------------------------------------------------------- what an entry vouches for


def origin(backend: str) -> dict[str, str]:
    """Of whom an entry is that is written now: the version of multiattn and the digest of its host code."""
    return {"multiattn": multiattn.__version__, "host": host_digest(backend)}


def check_origin(entry: Mapping[str, Any]) -> None:
    """ValueError for an entry that another version of multiattn wrote, or one whose launches are made otherwise."""
    if entry["backend"] not in registry.BACKENDS:
        raise ValueError(f"backend: got {entry['backend']!r}; allowed {', '.join(registry.BACKENDS)}")
    ours = origin(entry["backend"])
    if any(entry[name] != value for name, value in ours.items()):
        raise ValueError(
            f"emitted by multiattn {entry['multiattn']} (host code {entry['host']}); "
            f"allowed {ours['multiattn']} ({ours['host']}): emit it again"
        )


@functools.cache
def host_digest(backend: str) -> str:
    """Digest of the source of all that makes a Binding.

    That is the backend's `bind`, what it imports of its folder and those in it, and `_HOST_SOURCES`.
    """
    paths = {_ROOT / name for name in _HOST_SOURCES}
    todo = [_ROOT / backend / "bind.py"]
    while todo:
        path = todo.pop()
        if path not in paths:
            paths.add(path)
            todo += _imported(path, backend)
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.relative_to(_ROOT).as_posix()}\n{path.read_text(encoding='utf-8')}\0".encode())
    return digest.hexdigest()[:_DIGITS]


def _imported(path: Path, backend: str) -> list[Path]:
    """Modules of a backend's folder, or of one in it, that a file imports, at its top or further in."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    parts = [name.split(".")[1:] for name in names if name.startswith(f"multiattn.{backend}.")]
    found = [_ROOT.joinpath(*part[:end]).with_suffix(".py") for part in parts for end in range(2, len(part) + 1)]
    return [path for path in found if path.exists()]


def seal(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry with its own digest."""
    return {**entry, _SEAL: _digest_of(entry)}


def check_seal(entry: Mapping[str, Any]) -> None:
    """ValueError for an entry that is not as it was written."""
    if (digest := _digest_of(entry)) != entry.get(_SEAL):
        raise ValueError(f"{_SEAL}: got {entry.get(_SEAL)!r}; allowed {digest}: the entry was changed by hand")


def _digest_of(entry: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in entry.items() if name != _SEAL}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# ---------------------------------------------------------------- what an entry says

_THREADS_AT_MOST = 1024  # of a block
# Of cuTensorMapEncodeTiled: extents of a box, its rank, and the last of CUtensorMapSwizzle and CUtensorMapDataType.
_BOX_EXTENT, _BOX_RANK, _LAST_SWIZZLE, _LAST_DTYPE = 256, 5, 6, 15
_INT64_MAX = 2**63 - 1
_THREADS_OF_CUTILE = 1  # the driver finds the number in the cubin


def plan_of(entry: Mapping[str, Any]) -> Plan:
    """The Plan that a forward kernel was compiled for; ValueError for one that cannot be."""
    if entry["direction"] != "forward":
        raise ValueError(f"direction: got {entry['direction']!r}; allowed forward")
    backend = registry.get(entry["backend"])
    arch = by_name(_text("arch", entry["arch"]))
    if not arch.is_gpu:
        raise ValueError(f"arch: got {arch.name}; allowed a GPU's")
    variant = find_variant(backend, _text("variant", entry["variant"]))
    problem = _problem_of(_record("problem", entry["problem"]))
    plan = plan_variant(backend, variant, problem, arch, _config_of(entry["config"], variant))
    if not isinstance(plan, Plan):
        raise ValueError("; ".join(map(str, plan)))
    return plan


def _problem_of(record: Mapping[str, Any]) -> Problem:
    _same_names("problem", record, [field.name for field in fields(Problem)])
    if record["dtype"] not in list(DTYPES):
        raise ValueError(f"dtype: got {record['dtype']!r}; allowed {', '.join(DTYPES)}")
    if type(record["causal"]) is not bool or type(record["scale"]) not in (int, float):
        raise ValueError(f"causal, scale: got {record['causal']!r}, {record['scale']!r}; allowed a bool, a number")
    sizes = ("batch", "heads_q", "heads_kv", "seq_q", "seq_kv", "head_dim")
    problem = Problem.contiguous(
        **{name: _integer(name, record[name], 0, abi.INT32_MAX) for name in sizes},
        dtype=record["dtype"],
        causal=record["causal"],
        scale=record["scale"],
    )
    alignments = [2**power for power in range(VECTOR_BYTES.bit_length()) if 2**power >= problem.torch_dtype.itemsize]
    if type(record["alignment"]) is not int or record["alignment"] not in alignments:
        raise ValueError(f"alignment: got {record['alignment']!r}; allowed {', '.join(map(str, alignments))}")
    return replace(
        problem,
        strides_q=_strides("strides_q", record["strides_q"]),
        strides_k=_strides("strides_k", record["strides_k"]),
        strides_v=_strides("strides_v", record["strides_v"]),
        alignment=record["alignment"],
    )


def _strides(name: str, value: object) -> Strides:
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError(f"{name}: got {value!r}; allowed three integers")
    batch, head, row = (_integer(name, stride, 0, _INT64_MAX) for stride in value)
    return batch, head, row


def _config_of(value: object, variant: Variant) -> Config | None:
    """The config of an entry: one of the variant's own kind, none only where it has none."""
    if not variant.rules:
        if value is not None:
            raise ValueError(f"config: got {value!r}; allowed null: {variant.name} has none")
        return None
    kind: type[Config] = type(variant.rules[0].config)
    record = _record("config", value)
    _same_names("config", record, [field.name for field in fields(kind)])
    for name, hint in typing.get_type_hints(kind).items():
        allowed = typing.get_args(hint) or (hint,)
        if type(record[name]) not in allowed:
            raise ValueError(f"config: {name}: got {record[name]!r}; allowed {hint}")
        if type(record[name]) is int:
            _integer(f"config: {name}", record[name], 1, abi.INT32_MAX)
    return kind(**record)


def image_of(launch: Mapping[str, Any], backend: str, arch: Arch) -> abi.Image:
    """The Image of an entry's launch; ValueError for what no kernel of this backend can have."""
    of_cutile = backend == "cutile"
    boxes = launch["boxes"]
    if not isinstance(boxes, list):
        raise ValueError(f"boxes: got {boxes!r}; allowed a list")
    return abi.Image(
        threads=_integer("threads", launch["threads"], 1, _THREADS_OF_CUTILE if of_cutile else _THREADS_AT_MOST),
        dynamic_smem_bytes=_integer("dynamic_smem_bytes", launch["dynamic_smem_bytes"], 0, arch.smem_per_block),
        boxes=tuple(_box_of(_record("boxes", box)) for box in boxes),
    )


def _box_of(record: Mapping[str, Any]) -> abi.Box:
    _same_names("boxes", record, [field.name for field in fields(abi.Box)])
    extents = record["extents"]
    if not isinstance(extents, list) or not 1 <= len(extents) <= _BOX_RANK:
        raise ValueError(f"boxes: extents: got {extents!r}; allowed 1 to {_BOX_RANK} integers")
    return abi.Box(
        extents=tuple(_integer("boxes: extents", extent, 1, _BOX_EXTENT) for extent in extents),
        swizzle=_integer("boxes: swizzle", record["swizzle"], 0, _LAST_SWIZZLE),
        dtype=_integer("boxes: dtype", record["dtype"], 0, _LAST_DTYPE),
    )


def constants_of(launch: Mapping[str, Any]) -> Mapping[str, str]:
    """What the code is specialised on, by name."""
    return {name: _text(f"constants: {name}", text) for name, text in _record("constants", launch["constants"]).items()}


def launch_of(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """What an entry says of its launch."""
    launch = _record("launch", entry["launch"])
    _same_names("launch", launch, [*(field.name for field in fields(abi.Image)), "constants"])
    return launch


def symbol_of(entry: Mapping[str, Any]) -> str:
    """The kernel's name in its cubin."""
    return _text("symbol", entry["symbol"])


def _record(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name}: got {value!r}; allowed a record")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}: got {value!r}; allowed a string")
    return value


def _integer(name: str, value: object, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:  # a bool is none
        raise ValueError(f"{name}: got {value!r}; allowed {low} to {high}, an integer")
    return value


def _same_names(what: str, record: Mapping[str, Any], names: Sequence[str]) -> None:
    if set(record) != set(names):
        got = f"got no {', '.join(map(repr, absent))}" if (absent := sorted(set(names) - set(record))) else "got"
        more = sorted(set(record) - set(names))
        raise ValueError(f"{what}: {got}{f' {more}' if more else ''}; allowed {', '.join(names)}")
