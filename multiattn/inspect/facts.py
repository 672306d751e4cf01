"""What a cubin says of a kernel: registers, spills, shared memory, occupancy, instructions, remarks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from multiattn.inspect import mix, remarks, sass
from multiattn.inspect.mix import Counts, Mix
from multiattn.inspect.remarks import Row
from multiattn.plan.arch import occupancy
from multiattn.plan.backend import Exported, Plan
from multiattn.plan.toolchain import disassemble, resource_usage


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """One kernel as it was compiled. Registers and stack are a thread's, shared memory a block's, in bytes."""

    kernel: str
    threads: int
    """Of a block."""
    registers: int
    stack_bytes: int
    static_smem_bytes: int
    """That the cubin has; without the KiB that the system keeps in every block."""
    dynamic_smem_bytes: int
    """That a launch asks for."""
    blocks: int
    """That an SM holds at one time."""
    share: float
    """Of the warps that an SM can hold, 0 to 1."""
    limiter: str
    """What keeps one more block out: blocks, warps, registers or smem."""
    hot_loops: int
    """Loops that run on tensor cores for every block."""
    hot_spills: int
    """Loads and stores of local memory in them; in all of the code where there are none."""
    other_spills: int
    cubin_bytes: int
    seconds: float
    """That the compiler took."""
    mix: Mix
    remarks: tuple[Row, ...] = field(default=())
    """What cuTile's compiler chose for each source line."""
    chosen: tuple[str, ...] = ()
    """What of that a new compiler should still choose somewhere."""

    @property
    def name(self) -> str:
        """The kernel's symbol, without what cuTile appends of its signature."""
        return self.kernel.partition("_Kt")[0]

    @property
    def hot(self) -> Counts:
        """Instructions of the hot loops."""
        return self.mix.hot

    @property
    def code_bytes(self) -> int:
        """Of instructions."""
        return self.mix.code_bytes

    @property
    def smem_bytes(self) -> int:
        """Shared memory, static and dynamic."""
        return self.static_smem_bytes + self.dynamic_smem_bytes

    @property
    def features(self) -> tuple[str, ...]:
        """Which generation of tensor core the code uses, and which ways of moving data."""
        found = mix.features(self.mix)
        return tuple(name for name in mix.FEATURES if name in found)

    @property
    def main_mma(self) -> str:
        """The matrix multiplication that the hot loops have most of, by FLOP where the shape is known; or nothing."""
        names = self.hot.tensor_names or self.mix.code.tensor_names
        return max(names, key=lambda name: (names[name] * (mix.flop_of(name) or 1), name), default="")

    def as_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Facts:
        """Facts of what `as_dict` gave, through JSON or not."""
        given = {
            "mix": Mix.from_dict(data["mix"]),
            "remarks": tuple(Row(**it) for it in data["remarks"]),
            "chosen": tuple(data["chosen"]),
        }
        return cls(**{**data, **given})

    def __str__(self) -> str:
        spills = f"{self.hot_spills} + {self.other_spills}"
        return f"{self.name}: {self.registers} registers, {spills} spills, {self.smem_bytes} B, {self.blocks} blocks"


def read_kernel(kernel: Exported, plan: Plan) -> Facts:
    """Read the cubin of one kernel of `plan`.

    Raises RuntimeError where cuobjdump cannot read it, nobody says how many threads a block has, or it may hang: see
    `sass.parted_arrivals`.
    """
    usage, text = resource_usage(kernel.cubin), disassemble(kernel.cubin)
    if usage is None or text is None:
        raise RuntimeError(f"cuobjdump cannot read a cubin for {plan.arch.name}: is it older than the compiler?")
    threads = kernel.threads or usage.threads
    if threads is None:
        raise RuntimeError(f"{kernel.kernel}: neither its backend nor its cubin says how many threads a block has")
    fits = occupancy(plan.arch, threads, usage.registers, usage.smem_bytes + kernel.dynamic_smem_bytes)
    repairs = plan.direction == "forward" and plan.problem.causal
    code = sass.parse(text)
    if plan.backend == "cuda" and (parted := sass.parted_arrivals(code)):
        places = ", ".join(map(hex, parted))
        raise RuntimeError(
            f"{kernel.kernel}: lanes leave their warp to arrive at an mbarrier, at {places}: it may hang"
        )
    found = mix.measure(code, repairs=repairs)
    said = remarks.parse(kernel.remarks) if kernel.remarks else ()
    return Facts(
        kernel=kernel.kernel,
        threads=threads,
        registers=usage.registers,
        stack_bytes=usage.stack_bytes,
        static_smem_bytes=usage.smem_bytes,
        dynamic_smem_bytes=kernel.dynamic_smem_bytes,
        blocks=fits.blocks,
        share=round(fits.share, 4),
        limiter=fits.limiter,
        hot_loops=len(found.loops),
        hot_spills=found.hot.spills,
        other_spills=found.code.spills - found.hot.spills,
        cubin_bytes=len(kernel.cubin),
        seconds=round(kernel.seconds, 2),
        mix=found,
        remarks=remarks.per_line(said),
        chosen=tuple(sorted(remarks.facts(said))),
    )
