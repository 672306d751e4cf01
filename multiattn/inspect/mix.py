"""The instructions of a kernel's machine code (SASS) by class: in all of it, and in its hot loops."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from multiattn.inspect import sass
from multiattn.inspect.sass import MMA_SYNC, TCGEN05, WGMMA, Instruction

INSTRUCTION_BYTES = 16

TENSOR = ("HMMA", "HGMMA", "UTCHMMA", "other tensor")
"""The classes of matrix multiplications."""
SPILLS = ("LDL", "STL")
OTHER = "other"

_ALONE = "HMMA HGMMA UTCHMMA LDSM STSM LDGSTS UTMALDG UTMASTG UTMAREDG LDS STS LDL STL LDTM STTM MUFU SHFL"
"""Opcodes that are a class each; MUFU but for EX2."""
_OPCODES: Mapping[str, str] = {
    **{opcode: opcode for opcode in _ALONE.split()},
    "UTMA other": "UTMAPF UTMACCTL UTMACMDFLUSH",
    "UBLKCP": "UBLKCP UBLKRED UBLKPF",
    "LDG": "LDG LD",
    "STG": "STG ST",
    "RED/ATOM": "RED REDG REDAS ATOM ATOMG ATOMS",
    "LDC": "LDC LDCU ULDC",
    "tcgen05 other": "UTCBAR UTCATOMSWS UTCCP UTCSHIFT UVIRTCOUNT",
    "FP32": "FFMA FMUL FADD FMNMX FMNMX3 FSETP FSET FSEL FCHK FSWZADD FFMA2 FMUL2 FADD2 FFMA32I FMUL32I FADD32I",
    "FP64": "DFMA DMUL DADD DSETP DMNMX",
    "FP16": "HFMA2 HMUL2 HADD2 HSETP2 HSET2 HMNMX2 HFMA2_32I HMUL2_32I HADD2_32I VHMNMX",
    "conversion": "F2F F2FP F2I F2IP I2F I2FP I2I I2IP FRND",
    "INT": (
        "IADD IADD3 IADD32I IMAD IMUL IMUL32I ISCADD IMNMX IABS ISETP ISET IDP IDP4A LEA LOP LOP3 LOP32I SHF SHL SHR "
        "BMSK BREV FLO POPC SGXT VIADD VIMNMX VIMNMX3 VIADDMNMX VABSDIFF VABSDIFF4 XMAD"
    ),
    "MOV": "MOV MOV32I SEL PRMT CS2R S2R P2R R2P PLOP3 PSETP",
    "uniform": (
        "R2UR S2UR UIADD UIADD3 UIMAD UIMNMX UIABS UISETP ULEA ULOP ULOP3 UMOV UPLOP3 UPSETP UP2UR UR2UP UPRMT USEL "
        "USGXT USHF USHL USHR UBMSK UBREV UFLO UPOPC UVIADD UVIMNMX UVIMNMX3 UCLEA ULEPC UGETNEXTWORKID "
        "UFADD UFMUL UFFMA UFSETP UFSEL UFMNMX UFRND UF2I UF2F UF2FP UF2IP UI2F UI2FP UI2I UI2IP"
    ),
    "vote": "VOTE VOTEU MATCH ELECT REDUX CREDUX MOVM",
    "BAR": "BAR B2R UCGABAR_ARV UCGABAR_WAIT",
    "SYNCS": "SYNCS ARRIVES",
    "fence": "DEPBAR LDGDEPBAR MEMBAR FENCE ERRBAR CGAERRBAR CCTL CCTLL CCTLT",
    "WARPGROUP": "WARPGROUP WARPSYNC ENDCOLLECTIVE USETMAXREG",
    "control": (
        "BRA BRX BRXU JMP JMX JMXU CALL RET EXIT KILL BREAK BSSY BSYNC BMOV RPCMOV NOP NANOSLEEP YIELD BPT LEPC "
        "ACQBULK PREEXIT"
    ),
}
"""Opcodes of each class, without what follows their first dot; `class_of` tells some of one opcode apart."""

EX2, MOVES, CONVERSIONS = "MUFU.EX2", "MOV", "conversion"
CLASSES = (*TENSOR, *(name for name in _OPCODES if name not in TENSOR), EX2, OTHER)

_CLASS_OF = {opcode: name for name, opcodes in _OPCODES.items() for opcode in opcodes.split()}
_SHAPE_OF_WARP = re.compile(r"\.(8|16)(8)(4|8|16|32|64|128|256)(?=\.|$)")
_SHAPE_OF_WARPGROUP = re.compile(r"\.(\d+)x(\d+)x(\d+)(?=\.|$)")
_CONSTANT = re.compile(r"\s*\w+, -RZ, RZ, ")  # 0 * 0 + a constant: how the half-precision pipe is made to move one

_FEATURES: Mapping[str, tuple[str, ...]] = {
    "ldmatrix": ("LDSM",),
    "cp.async": ("LDGSTS",),
    "bulk copy": ("UBLKCP",),
    "TMA load": ("UTMALDG",),
    "TMA store": ("UTMASTG",),
    "TMA reduce": ("UTMAREDG",),
    "mbarrier": ("SYNCS",),
}
GENERATIONS = {MMA_SYNC: "mma.sync", WGMMA: "wgmma", TCGEN05: "tcgen05"}
"""Generations of tensor cores, oldest first."""
FEATURES = (*GENERATIONS.values(), *_FEATURES)
"""All that `features` may find."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """The number of instructions of each class in a stretch of code; plain data, so that it goes through JSON."""

    classes: Mapping[str, int] = field(default_factory=dict)
    """Only those of CLASSES that occur."""
    tensor_names: Mapping[str, int] = field(default_factory=dict)
    """Matrix multiplications by their full name, which has the shape, except for tcgen05."""

    def __getitem__(self, name: str) -> int:
        """Instructions of a class; KeyError for none of CLASSES."""
        if name not in CLASSES:
            raise KeyError(f"class: got {name!r}; allowed {', '.join(CLASSES)}")
        return self.classes.get(name, 0)

    @property
    def instructions(self) -> int:
        """All instructions."""
        return sum(self.classes.values())

    @property
    def tensor(self) -> int:
        """Matrix multiplications of any size."""
        return sum(self[name] for name in TENSOR)

    @property
    def spills(self) -> int:
        """Loads and stores of local memory."""
        return sum(self[name] for name in SPILLS)

    def per_tensor(self, *classes: str) -> float | None:
        """Instructions of these classes for each matrix multiplication, or all others; None where there is none."""
        some = sum(self[name] for name in classes) if classes else self.instructions - self.tensor
        return some / self.tensor if self.tensor else None

    @property
    def flop_per_tensor(self) -> float | None:
        """FLOP of the mean matrix multiplication; None where there is none, or one is of unknown shape."""
        flops = [(flop_of(name), count) for name, count in self.tensor_names.items()]
        if not flops or any(flop is None for flop, _ in flops):
            return None
        return sum(count * (flop or 0) for flop, count in flops) / self.tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """The instructions of one kernel, by class."""

    code: Counts
    """All of its code."""
    hot: Counts
    """Its hot loops together; all of its code where it has none."""
    hot_loops: int
    """The number of hot loops. Where warps have roles, one multiplies and another computes the exponentials."""
    code_bytes: int


def measure(code: Sequence[Instruction]) -> Mix:
    """The mix of the instructions of one kernel, as `sass.parse` gives them.

    ValueError for no code, or for more than one kernel's.
    """
    if not code:
        raise ValueError("code: got no instruction; allowed those of one kernel")
    if any(later.address <= sooner.address for sooner, later in itertools.pairwise(code)):
        raise ValueError("code: got addresses that start again, so more than one kernel; allowed those of one")
    loops = sass.hot_loops(code)
    places = frozenset().union(*(loop.body for loop in loops)) if loops else range(len(code))
    return Mix(
        code=count(code),
        hot=count(code[place] for place in places),
        hot_loops=len(loops),
        code_bytes=code[-1].address - code[0].address + INSTRUCTION_BYTES,
    )


def count(code: Iterable[Instruction]) -> Counts:
    """Count instructions by class."""
    classes: Counter[str] = Counter()
    tensor_names: Counter[str] = Counter()
    for it in code:
        name = class_of(it)
        classes[name] += 1
        if name in TENSOR:
            tensor_names[it.name] += 1
    return Counts(classes=dict(sorted(classes.items())), tensor_names=dict(sorted(tensor_names.items())))


def class_of(it: Instruction) -> str:
    """The one class of an instruction.

    IMAD.MOV and ``HFMA2 R, -RZ, RZ, constant`` only move a value, and HADD2.F32 only widens a half: the opcode alone
    does not say so.
    """
    base, _, modifiers = it.name.partition(".")
    if base == "MUFU" and modifiers.partition(".")[0] == "EX2":
        return EX2
    if it.name.startswith("IMAD.MOV") or (base == "HFMA2" and _CONSTANT.match(it.operands)):
        return MOVES
    if it.name == "HADD2.F32":
        return CONVERSIONS
    if base in _CLASS_OF:
        return _CLASS_OF[base]
    return "other tensor" if it.unit is not None else OTHER


def flop_of(name: str) -> int | None:
    """FLOP of one matrix multiplication by its full name; None where that has no shape, or leaves out zeros (SP)."""
    found = _SHAPE_OF_WARPGROUP.search(name) or _SHAPE_OF_WARP.search(name)
    if found is None or ".SP." in name:
        return None
    m, n, k = map(int, found.groups())
    return 2 * m * n * k


def features(code: Counts) -> tuple[str, ...]:
    """The members of FEATURES that some code has, in their order."""
    units = {unit for name in code.tensor_names if (unit := sass.unit_of(name)) is not None}
    moves = {name for name, classes in _FEATURES.items() if any(code[it] for it in classes)}
    return tuple(name for name in FEATURES if name in {GENERATIONS[unit] for unit in units} | moves)
