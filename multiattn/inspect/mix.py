"""What a kernel's machine code (SASS) is made of: instructions by class, in all of it and in its hot loops."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from multiattn.inspect import sass
from multiattn.inspect.sass import MMA_SYNC, TCGEN05, WGMMA, Instruction
from multiattn.plan.arch import WARP_THREADS

INSTRUCTION_BYTES = 16
WARPGROUP_WARPS = 4

TENSOR = ("HMMA", "HGMMA", "UTCHMMA", "other tensor")
"""Classes of matrix multiplications."""
SPILLS = ("LDL", "STL")
OTHER = "other"

_OPCODES: Mapping[str, str] = {
    "HMMA": "HMMA",
    "HGMMA": "HGMMA",
    "UTCHMMA": "UTCHMMA",
    "LDSM": "LDSM",
    "STSM": "STSM",
    "LDGSTS": "LDGSTS",
    "UTMALDG": "UTMALDG",
    "UTMASTG": "UTMASTG",
    "UTMAREDG": "UTMAREDG",
    "UTMA other": "UTMAPF UTMACCTL UTMACMDFLUSH",
    "UBLKCP": "UBLKCP UBLKRED UBLKPF",
    "LDG": "LDG LD",
    "STG": "STG ST",
    "RED/ATOM": "RED REDG REDAS ATOM ATOMG ATOMS",
    "LDS": "LDS",
    "STS": "STS",
    "LDL": "LDL",
    "STL": "STL",
    "LDC": "LDC LDCU ULDC",
    "LDTM": "LDTM",
    "STTM": "STTM",
    "tcgen05 other": "UTCBAR UTCATOMSWS UTCCP UTCSHIFT UVIRTCOUNT",
    "MUFU": "MUFU",  # but EX2
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
    "SHFL": "SHFL",
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
"""Of tensor cores, oldest first."""
FEATURES = (*GENERATIONS.values(), *_FEATURES)
"""What `features` may say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """How many instructions of each class a stretch of code has; plain data, so that it goes through JSON."""

    classes: Mapping[str, int] = field(default_factory=dict)
    """Those of CLASSES that there are."""
    tensor_names: Mapping[str, int] = field(default_factory=dict)
    """Matrix multiplications by their full name, which has the shape, except for tcgen05."""
    unknown: Mapping[str, int] = field(default_factory=dict)
    """Opcodes that are in no class but `other`."""

    def __getitem__(self, name: str) -> int:
        """Instructions of a class; KeyError for none of CLASSES."""
        if name not in CLASSES:
            raise KeyError(f"class: got {name!r}; allowed {', '.join(CLASSES)}")
        return self.classes.get(name, 0)

    @property
    def instructions(self) -> int:
        """All of them."""
        return sum(self.classes.values())

    @property
    def tensor(self) -> int:
        """Matrix multiplications, of whatever size."""
        return sum(self[name] for name in TENSOR)

    @property
    def spills(self) -> int:
        """Loads and stores of local memory."""
        return sum(self[name] for name in SPILLS)

    @property
    def others_per_tensor(self) -> float | None:
        """Instructions of any other kind for each matrix multiplication; None where there is none, as below."""
        return _ratio(self.instructions - self.tensor, self.tensor)

    @property
    def alu_per_tensor(self) -> float | None:
        """Arithmetic in FP32 and INT for each matrix multiplication."""
        return _ratio(self["FP32"] + self["INT"], self.tensor)

    @property
    def ex2_per_tensor(self) -> float | None:
        """MUFU.EX2 for each matrix multiplication."""
        return _ratio(self[EX2], self.tensor)

    @property
    def warp_flop(self) -> float | None:
        """FLOP of one pass, a warp's share of them; None where there are none, or one is of unknown shape."""
        if not self.tensor_names or any(flop_of(name) is None for name in self.tensor_names):
            return None
        return sum(count * (flop_of(name) or 0) / warps_of(name) for name, count in self.tensor_names.items())

    @property
    def flop_per_tensor(self) -> float | None:
        """FLOP of the mean matrix multiplication, whichever number of warps works on it; None as `warp_flop`."""
        if self.warp_flop is None:
            return None
        return _ratio(sum(count * (flop_of(name) or 0) for name, count in self.tensor_names.items()), self.tensor)

    @property
    def ex2_per_flop(self) -> float | None:
        """Exponentials, each lane's counted, for each FLOP of the tensor cores; None as `warp_flop`.

        Attention needs ``1 / (4 D)`` forward, as each score costs 4 D FLOP, and a little for the running maximum.
        """
        return None if self.warp_flop is None else self[EX2] * WARP_THREADS / self.warp_flop


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """The instructions of one kernel."""

    code: Counts
    """All of it, rare passes and padding included."""
    hot: Counts
    """The hot loops together; all of the code where it has none, as for `sass.Spills`."""
    loops: tuple[Counts, ...]
    """Each hot loop. Where warps have roles, one loop issues the multiplications and another the exponentials."""
    code_bytes: int

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Mix:
        """A Mix of what `dataclasses.asdict` made of one, through JSON or not."""
        return cls(
            code=Counts(**data["code"]),
            hot=Counts(**data["hot"]),
            loops=tuple(Counts(**loop) for loop in data["loops"]),
            code_bytes=data["code_bytes"],
        )


def measure(code: Sequence[Instruction], *, repairs: bool) -> Mix:
    """The mix of a kernel's instructions.

    Args:
        code: what `sass.parse` gives for one kernel.
        repairs: as `sass.find_spills` takes it.

    Raises ValueError for no code, or for more than one kernel's.
    """
    if not code:
        raise ValueError("code: got no instruction; allowed those of one kernel")
    if any(later.address <= sooner.address for sooner, later in itertools.pairwise(code)):
        raise ValueError("code: got addresses that start again, so more than one kernel; allowed those of one")
    loops = sass.hot_loops(code, repairs=repairs)
    places = frozenset().union(*(loop.body for loop in loops)) if loops else range(len(code))
    return Mix(
        code=count(code),
        hot=count(code[place] for place in places),
        loops=tuple(count(code[place] for place in loop.body) for loop in loops),
        code_bytes=code[-1].address - code[0].address + INSTRUCTION_BYTES,
    )


def count(code: Iterable[Instruction]) -> Counts:
    """The instructions by class."""
    classes: Counter[str] = Counter()
    tensor_names: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    for it in code:
        name = class_of(it)
        classes[name] += 1
        if name in TENSOR:
            tensor_names[it.name] += 1
        elif name == OTHER:
            unknown[it.name.partition(".")[0]] += 1
    return Counts(classes=_sorted(classes), tensor_names=_sorted(tensor_names), unknown=_sorted(unknown))


def class_of(it: Instruction) -> str:
    """The one class of an instruction.

    An opcode alone does not say what IMAD.MOV and ``HFMA2 R, -RZ, RZ, constant`` are for: to move. Nor does HADD2.F32,
    which widens a half.
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
    if ".SP." in name:
        return None
    found = _SHAPE_OF_WARPGROUP.search(name) or _SHAPE_OF_WARP.search(name)
    if found is None:
        return None
    m, n, k = map(int, found.groups())
    return 2 * m * n * k


def warps_of(name: str) -> int:
    """Warps that issue one matrix multiplication together: each of a warpgroup has the instruction in its code."""
    return WARPGROUP_WARPS if _unit(name) == WGMMA else 1


def features(mix: Mix) -> frozenset[str]:
    """Which of FEATURES the code has anywhere, rare passes included: what a new compiler must not lose."""
    used = {GENERATIONS[unit] for unit in generations(mix.code)}
    return frozenset(used | {name for name, classes in _FEATURES.items() if any(mix.code[it] for it in classes)})


def generations(counts: Counts) -> frozenset[int]:
    """Which of GENERATIONS a stretch of code multiplies with, by number; newer ones have higher ones."""
    return frozenset(unit for name in counts.tensor_names if (unit := _unit(name)) is not None)


def _unit(name: str) -> int | None:
    return Instruction(address=0, guarded=False, name=name, operands="").unit


def _ratio(some: float, others: float) -> float | None:
    return some / others if others else None


def _sorted(counter: Counter[str]) -> dict[str, int]:
    return dict(sorted(counter.items()))
