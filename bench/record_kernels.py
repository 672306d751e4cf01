"""One kernel of the record: a digest of its machine code, its resources, the instructions of its loops."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from bench.record_doors import Doors, open_doors
from multiattn.inspect import store
from multiattn.inspect.facts import Facts, read_kernel
from multiattn.inspect.mix import Counts
from multiattn.plan import backend as registry
from multiattn.plan.backend import Exported, Plan
from multiattn.run import cache

NO_SPILLS_UP_TO = 128
"""The head_dim up to which no rule may spill in a loop that every block runs."""
KNOWN_SPILLS: Mapping[tuple[str, str, str], int] = {
    ("triton", "warp_specialized", "sm90"): 14,
    ("cutile", "full", "sm120"): 2,
    ("cutile", "full", "sm121"): 2,
}
"""By backend, variant and arch, the spills in hot loops that pass all the same. The compiler on record makes worse code
of Gluon's kernel than the one that its rules were measured with (docs/gluon.md, "Newer Tritons"). cuTile's rule for
causal D=128 has spilled twice since the kernel lost its second pass; nobody has measured it on these arches.
"""
_KEPT = re.compile(r"\.(text|nv\.constant(?!4\b)\d+|nv\.shared)(?=\.|$)")
_RESERVED = ".nv.shared.reserved"
_NOBITS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One kernel as it was compiled: digests of what reached the compiler (`key`) and of the machine code (`digest`).

    The other fields are those of multiattn.inspect.facts.Facts; `hot` and `mma` count the instructions of its hot loops
    by class, and its matrix multiplications by full name.
    """

    name: str
    key: str
    digest: str
    threads: int
    registers: int
    stack_bytes: int
    smem_bytes: int
    blocks: int
    share: float
    limiter: str
    code_bytes: int
    hot_loops: int
    hot_spills: int
    other_spills: int
    hot: Mapping[str, int]
    mma: Mapping[str, int]
    features: tuple[str, ...]
    chosen: tuple[str, ...] = ()

    @property
    def counts(self) -> Counts:
        """The instructions of the hot loops, to be asked for ratios."""
        return Counts(classes=self.hot, tensor_names=self.mma)

    @classmethod
    def of(cls, facts: Facts, *, key: str, digest: str) -> Kernel:
        """The kernel that was read off a cubin."""
        own: dict[str, Any] = {"key": key, "digest": digest, "hot": facts.hot.classes, "mma": facts.hot.tensor_names}
        return cls(**own, **{it.name: getattr(facts, it.name) for it in fields(cls) if it.name not in own})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Kernel:
        """The kernel of its own fields, from JSON."""
        return cls(**{**data, "features": tuple(data["features"]), "chosen": tuple(data["chosen"])})


def main_of(kernels: tuple[Kernel, ...]) -> Kernel:
    """The kernel of a launch that most of the work is in: the one with the most tensor-core instructions."""
    return max(kernels, key=lambda it: (it.counts.tensor, it.code_bytes))


def promised_without_spills(key: tuple[str, ...]) -> int | None:
    """The most spills that a rule may have in its hot loops; None where nothing is promised.

    The promise is made to callers who name no variant: a rung may be there to show what spills cost.
    """
    backend, direction, name, arch, head_dim = key[:5]
    variants = registry.get(backend).op("forward" if direction == "forward" else "backward").variants
    named = any(variant.name == name and variant.only_named for variant in variants)
    return None if named or int(head_dim) > NO_SPILLS_UP_TO else KNOWN_SPILLS.get((backend, name, arch), 0)


# ---------------------------------------------------------------- machine code


def digest_of(kernel: Exported) -> str:
    """Sixteen hex digits over code, constants, shared memory, registers and launch.

    Left out are names, debug information, notes, build ids, and variables in global memory with bank 4, which has their
    addresses: no kernel here reads any, but the compiler keeps constants there that a header names.
    """
    found = []
    for name, data, size, info in _sections(kernel.cubin):
        kind = _KEPT.match(name)
        if kind is not None and not name.startswith(_RESERVED):
            registers = info >> 24 if kind[1] == "text" else 0
            found.append((kind[1], size, registers, hashlib.sha256(data).hexdigest()))
    launch = (found, kernel.threads, kernel.dynamic_smem_bytes)
    return hashlib.sha256(repr(launch).encode()).hexdigest()[:16]


def _sections(cubin: bytes) -> Iterator[tuple[str, bytes, int, int]]:
    """Name, content, size and ``sh_info`` of each section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    each, count, of_names = struct.unpack_from("<HHH", cubin, 0x3A)
    heads = [struct.unpack_from("<IIQQQQII", cubin, table + each * place) for place in range(count)]
    names = cubin[heads[of_names][4] : heads[of_names][4] + heads[of_names][5]]
    for name, kind, _, _, offset, size, _, info in heads:
        content = b"" if kind == _NOBITS else cubin[offset : offset + size]
        yield names[name : names.index(b"\0", name)].decode(), content, size, info


# ---------------------------------------------------------------- compiled


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A rule to compile; its kernels on record are not read again while their digest is the same."""

    plan: Plan
    known: tuple[Kernel, ...] = ()


@functools.cache
def doors() -> Doors:
    """The doors of this process."""
    return open_doors(cache.directory() / "compiled")


def compile_task(task: Task) -> tuple[Kernel, ...]:
    """Compile the kernels of a Plan, unless the cache has them. The compiler's own exception passes through."""
    stand, plan = doors(), task.plan
    stand.take()
    made = registry.get(plan.backend).op(plan.direction).export(plan, ())
    known = {it.key: it for it in task.known}
    return tuple(_read(it, key, plan, known.get(key)) for it, key in zip(made, stand.take(), strict=True))


def _read(kernel: Exported, key: str, plan: Plan, known: Kernel | None) -> Kernel:
    digest = digest_of(kernel)
    if known is not None and known.digest == digest:
        return known
    kept = doors().folder / f"{key}.facts-{store.readers()[:8]}.json"  # Triton takes any in the folder for its own
    try:
        facts = Facts.from_dict(json.loads(kept.read_text()))
    except (OSError, ValueError, KeyError, TypeError):  # not there, or cut off: it is read again
        facts = read_kernel(kernel, plan)
        draft = kept.with_suffix(".new")
        draft.write_text(json.dumps(asdict(facts)))
        draft.replace(kept)
    return Kernel.of(facts, key=key, digest=digest)
