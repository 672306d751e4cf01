"""Where a kernel spills, and where a warp parts: its machine code (SASS) as a graph, with the loops on tensor cores.

A stack alone says little: forward kernels have a rare repair that spills so that the loops every block runs need not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Graph = Mapping[int, Sequence[int]]
"""Of each instruction, by its place in the code, the places that may follow it."""

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;\n]*)", re.MULTILINE)
_ADDRESS = re.compile(r"0x([0-9a-f]+)")
_CONDITION = re.compile(r"\bU?P\d")
_SPILLS = ("LDL", "STL")
_RAISES_REGISTERS = "USETMAXREG.TRY_ALLOC"
_ENDS = ("EXIT", "RET", "BRX", "BRXU")

MMA_SYNC, WGMMA, TCGEN05 = range(3)
_TENSOR_CORE = (
    (TCGEN05, re.compile(r"UTC\w*MMA|LDTM|STTM")),  # the warps that read tensor memory have loops of their own
    (WGMMA, re.compile(r"\w?GMMA")),
    (MMA_SYNC, re.compile(r"\w?MMA")),
)

REPAIR_DENSITY = 0.5
"""A loop of mma.sync with less than this share of the densest loop's MMAs an instruction is a repair: it looks at
each value, on smaller tiles. Compiled for sm80 to sm121, D=64 to 256: loops with a mask have 0.74 and more, repairs
0.47 and less.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """One line of SASS."""

    address: int
    guarded: bool
    """Whether a predicate may switch it off."""
    name: str
    operands: str

    @property
    def unit(self) -> int | None:
        """The generation of tensor core that it is for, or None."""
        base = self.name.partition(".")[0]
        return next((unit for unit, pattern in _TENSOR_CORE if pattern.fullmatch(base)), None)

    @property
    def spills(self) -> bool:
        """Whether it touches local memory."""
        return self.name.startswith(_SPILLS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """A loop of the code: where its instructions are, and the tensor core's among them."""

    body: frozenset[int]
    own: tuple[int, ...]
    """Units of the MMAs that are in no loop within it."""
    nested: int
    """MMAs in loops within it."""

    @property
    def density(self) -> float:
        """MMAs an instruction."""
        return len(self.own) / len(self.body)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spills:
    """Loads and stores of local memory in a kernel's code."""

    hot_loops: int
    """Loops that run on tensor cores for every block; 0 for a kernel that has none, all of which counts as hot."""
    hot: int
    elsewhere: int


def find_spills(sass: str, *, repairs: bool) -> Spills:
    """Tell spills in the hot loops of a kernel from the others.

    Args:
        sass: of one kernel, as `multiattn.plan.toolchain.disassemble` gives it.
        repairs: whether the kernel has a rare pass of smaller tiles beside its loops, as causal forward kernels have;
            without, every loop on tensor cores is hot.

    Raises ValueError for text without code.
    """
    code = parse(sass)
    if not code:
        raise ValueError("sass: got text without an instruction; allowed what cuobjdump -sass prints of a kernel")
    hot = hot_loops(code, repairs=repairs)
    places = frozenset().union(*(loop.body for loop in hot)) if hot else frozenset(range(len(code)))
    spills = {place for place, it in enumerate(code) if it.spills}
    return Spills(hot_loops=len(hot), hot=len(spills & places), elsewhere=len(spills - places))


def parted_arrivals(code: Sequence[Instruction]) -> list[int]:
    """Addresses where some lanes of a warp that computes branch off to arrive at an mbarrier.

    `mbarrier_arrive_if` has a predicate, so that the warp stays whole. ptxas may make a jump of one that ends a branch,
    and nothing brings the warp together again: whichever lanes come to the next named barrier first are counted as all
    of it, and the kernel hangs or computes nonsense. It is told by an arrival without a predicate that warps come to
    once they have raised their registers (`setmaxnreg`); the one thread that loads, which lowers them, has no other
    lanes to part from. Nothing is said of a kernel whose warps are all alike.

    It holds for kernels whose arrivals are all of chosen lanes, as this package's CUDA kernels are. Of a branch that
    the compiler knows to part a warp, and brings it together after, it would be a false alarm; none has been seen.
    """
    follows = successors(code)
    reached: set[int] = set()
    waiting = [place for place, it in enumerate(code) if it.name.startswith(_RAISES_REGISTERS)]
    while waiting:
        place = waiting.pop()
        if place not in reached:
            reached.add(place)
            waiting += follows[place]
    found = (code[place] for place in sorted(reached))
    return [it.address for it in found if it.name.startswith("SYNCS.ARRIVE") and not it.guarded]


def parse(sass: str) -> list[Instruction]:
    """The instructions of a kernel, in order."""
    return [
        Instruction(address=int(address, 16), guarded=bool(guard), name=name, operands=operands)
        for address, guard, name, operands in _INSTRUCTION.findall(sass)
    ]


def hot_loops(code: Sequence[Instruction], *, repairs: bool) -> list[Loop]:
    """The loops that keep the tensor cores busy: those with MMAs of their own, repairs left out.

    A repair's tiles have 16 rows, for which only mma.sync will do. So where the kernel has wgmma or tcgen05, its hot
    loops are those that use them; where it has not, they are told by their density.
    """
    loops = [loop for loop in find_loops(code) if loop.own and len(loop.own) >= loop.nested]
    if not repairs or not loops:
        return loops
    newest = max(max(loop.own) for loop in loops)
    loops = [loop for loop in loops if max(loop.own) == newest]
    if newest > MMA_SYNC:
        return loops
    densest = max(loop.density for loop in loops)
    return [loop for loop in loops if loop.density >= REPAIR_DENSITY * densest]


def find_loops(code: Sequence[Instruction]) -> list[Loop]:
    """Every loop, outer ones before those within.

    A loop is a set of instructions that all reach each other; what is within it shows when its entries are cut off.
    Going by address would not do: compilers put the slow path of a wait at the end, from where it jumps back.
    """
    units = {place: unit for place, it in enumerate(code) if (unit := it.unit) is not None}
    loops: list[Loop] = []
    waiting = [(frozenset(range(len(code))), successors(code))]
    while waiting:
        places, follows = waiting.pop()
        for body in _knots(sorted(places), follows):
            entries = {after for place in places - body for after in follows[place] if after in body} or {min(body)}
            kept = body - entries
            inside = {place: [after for after in follows[place] if after in kept] for place in body}
            waiting.append((body, inside))
            nested = frozenset().union(*_knots(sorted(body), inside))
            own = tuple(unit for place, unit in units.items() if place in body - nested)
            within = sum(place in nested for place in units)
            loops.append(Loop(body=body, own=own, nested=within))
    return loops


def successors(code: Sequence[Instruction]) -> Graph:
    """What may follow each instruction. A call comes back; where an indirect jump goes is not known, nor needed."""
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


def _knots(places: Iterable[int], follows: Graph) -> list[frozenset[int]]:
    """Strongly connected components of more than one instruction, or of one that follows itself."""
    import networkx

    graph: Any = networkx.DiGraph()
    graph.add_nodes_from(sorted(places))
    graph.add_edges_from((place, after) for place in graph for after in follows[place] if after in graph)
    found = map(frozenset, networkx.strongly_connected_components(graph))
    return [knot for knot in found if len(knot) > 1 or any(place in follows[place] for place in knot)]
