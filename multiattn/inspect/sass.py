"""A kernel's machine code (SASS) as a graph: its loops on tensor cores, and the places where a warp parts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import networkx

Graph = Mapping[int, Sequence[int]]
"""For each place in the code, the places that may follow it."""

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;\n]*)", re.MULTILINE)
_ADDRESS = re.compile(r"0x([0-9a-f]+)")
_CONDITION = re.compile(r"\bU?P\d")
_RAISES_REGISTERS = "USETMAXREG.TRY_ALLOC"
_ENDS = ("EXIT", "RET", "BRX", "BRXU")

MMA_SYNC, WGMMA, TCGEN05 = range(3)
_TENSOR_CORE = (
    (TCGEN05, re.compile(r"UTC\w*MMA|LDTM|STTM")),  # the warps that read tensor memory have loops of their own
    (WGMMA, re.compile(r"\w?GMMA")),
    (MMA_SYNC, re.compile(r"\w?MMA")),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """One line of SASS."""

    address: int
    guarded: bool
    """True where a predicate may switch it off."""
    name: str
    operands: str

    @property
    def unit(self) -> int | None:
        """The generation of tensor core that it is for, or None."""
        return unit_of(self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """A loop: its instructions, by their places in the code, and the matrix multiplications among them."""

    body: frozenset[int]
    own: tuple[int, ...]
    """Units of the MMAs that are in no loop within it."""
    nested: int
    """MMAs in loops within it."""


def parted_arrivals(code: Sequence[Instruction]) -> list[int]:
    """Addresses where some lanes of a warp that computes branch off to arrive at an mbarrier.

    `mbarrier_arrive_if` has a predicate, so that the warp stays whole. ptxas may turn one at the end of a branch into a
    jump, and nothing brings the warp together again: the lanes that come to the next named barrier first are counted as
    the whole warp, and the kernel hangs or computes nonsense. The sign of it is an arrival without a predicate after
    the warp has raised its registers (`setmaxnreg`). The thread that loads lowers them, and has no other lanes to part
    from. Kernels whose warps are all alike have neither.

    This holds for kernels in which only chosen lanes arrive, as in this package's CUDA kernels. It would be a false
    alarm for a branch after which the compiler brings the warp together again; none has been seen.
    """
    graph = networkx.DiGraph(successors(code))
    raising = (place for place, it in enumerate(code) if it.name.startswith(_RAISES_REGISTERS))
    reached = {after for place in raising for after in networkx.descendants(graph, place)}
    found = (code[place] for place in sorted(reached))
    return [it.address for it in found if it.name.startswith("SYNCS.ARRIVE") and not it.guarded]


def parse(sass: str) -> list[Instruction]:
    """The instructions of a kernel, in order."""
    return [
        Instruction(address=int(address, 16), guarded=bool(guard), name=name, operands=operands)
        for address, guard, name, operands in _INSTRUCTION.findall(sass)
    ]


def unit_of(name: str) -> int | None:
    """The generation of tensor core that an instruction is for, by its name; None for any other."""
    base = name.partition(".")[0]
    return next((unit for unit, pattern in _TENSOR_CORE if pattern.fullmatch(base)), None)


def hot_loops(code: Sequence[Instruction]) -> list[Loop]:
    """The loops that keep the tensor cores busy: those with matrix multiplications of their own.

    Where a kernel has wgmma or tcgen05, its loops of mma.sync are left out: they compute a tile again, which is rare
    (`lazy_max`).
    """
    loops = [loop for loop in find_loops(code) if loop.own and len(loop.own) >= loop.nested]
    newest = max((max(loop.own) for loop in loops), default=MMA_SYNC)
    return [loop for loop in loops if max(loop.own) == newest]


def find_loops(code: Sequence[Instruction]) -> list[Loop]:
    """Every loop, outer ones before those within.

    A loop is a set of instructions that all reach each other. The loops within it are found by cutting off its entries.
    Addresses do not show loops: compilers put the slow path of a wait at the end of the code, and it jumps back.
    """
    units = {place: unit for place, it in enumerate(code) if (unit := it.unit) is not None}
    loops: list[Loop] = []
    waiting = [successors(code)]
    while waiting:
        follows = waiting.pop()
        for body in _knots(follows):
            outside = follows.keys() - body
            entries = {after for place in outside for after in follows[place] if after in body} or {min(body)}
            kept = body - entries
            inside = {place: [after for after in follows[place] if after in kept] for place in sorted(body)}
            waiting.append(inside)
            nested = frozenset().union(*_knots(inside))
            own = tuple(unit for place, unit in units.items() if place in body - nested)
            within = sum(place in nested for place in units)
            loops.append(Loop(body=body, own=own, nested=within))
    return loops


def successors(code: Sequence[Instruction]) -> Graph:
    """The places that may follow each instruction. A call comes back; targets of indirect jumps are left out."""
    place_of = {it.address: place for place, it in enumerate(code)}
    graph: dict[int, Sequence[int]] = {}
    for place, it in enumerate(code):
        following = [place + 1] if place + 1 < len(code) else []
        base = it.name.partition(".")[0]
        if base == "BRA":
            target = place_of[int(_ADDRESS.findall(it.operands)[-1], 16)]
            falls_through = it.guarded or it.name != "BRA" or _CONDITION.search(it.operands)
            graph[place] = [target, *(following if falls_through else [])]
        elif base in _ENDS:
            graph[place] = following if it.guarded else []
        else:
            graph[place] = following
    return graph


def _knots(follows: Graph) -> list[frozenset[int]]:
    """Strongly connected components of more than one instruction, or of one that follows itself."""
    found = map(frozenset, networkx.strongly_connected_components(networkx.DiGraph(follows)))
    return [knot for knot in found if len(knot) > 1 or any(place in follows[place] for place in knot)]
