"""Facts that a cubin tells of a kernel: registers, spills, shared memory, occupancy, instructions, remarks."""

from __future__ import annotations

from dataclasses import dataclass, fields

from multiattn.inspect import mix, remarks, sass
from multiattn.inspect.mix import Mix
from multiattn.inspect.remarks import Choice
from multiattn.plan import backend as registry
from multiattn.plan.arch import occupancy
from multiattn.plan.backend import Exported, Plan
from multiattn.plan.cubin import read_entry
from multiattn.plan.toolchain import disassemble


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts(Mix):
    """One kernel as it was compiled. Registers and stack are a thread's, shared memory a block's, in bytes."""

    kernel: str
    threads: int
    """Threads of a block."""
    registers: int
    stack_bytes: int
    static_smem_bytes: int
    """In the cubin, without the KiB that the system keeps in every block."""
    dynamic_smem_bytes: int
    """Bytes that a launch asks for."""
    blocks: int
    """Blocks that an SM holds at one time."""
    share: float
    """Share of the warps that an SM can hold, 0 to 1."""
    limiter: str
    """The resource that keeps one more block out: blocks, warps, registers or smem."""
    seconds: float
    """Time that the compiler took."""
    remarks: tuple[Choice, ...] = ()
    """The choices of cuTile's compiler for each source line."""
    chosen: tuple[str, ...] = ()
    """The part of `remarks` that a new compiler should still choose somewhere."""

    @property
    def name(self) -> str:
        """The kernel's symbol, without what cuTile appends of its signature."""
        return self.kernel.partition("_Kt")[0]

    @property
    def hot_spills(self) -> int:
        """Loads and stores of local memory in the hot loops."""
        return self.hot.spills

    @property
    def other_spills(self) -> int:
        """Loads and stores of local memory elsewhere."""
        return self.code.spills - self.hot.spills

    @property
    def smem_bytes(self) -> int:
        """Shared memory, static and dynamic."""
        return self.static_smem_bytes + self.dynamic_smem_bytes

    @property
    def features(self) -> tuple[str, ...]:
        """The generations of tensor core and the ways of moving data that the code uses."""
        return mix.features(self.code)

    @property
    def main_mma(self) -> str:
        """The matrix multiplication that the hot loops have most of, by FLOP where the shape is known; or nothing."""
        names = self.hot.tensor_names
        return max(names, key=lambda name: (names[name] * (mix.flop_of(name) or 1), name), default="")

    def __str__(self) -> str:
        spills = f"{self.hot_spills} + {self.other_spills}"
        return f"{self.name}: {self.registers} registers, {spills} spills, {self.smem_bytes} B, {self.blocks} blocks"


def read_plan(plan: Plan) -> tuple[Facts, ...]:
    """Compile the kernels of `plan` and read them. The compiler's own exception passes through."""
    return tuple(read_kernel(it, plan) for it in registry.get(plan.backend).op(plan.direction).export(plan, ()))


def read_kernel(kernel: Exported, plan: Plan) -> Facts:
    """Read the cubin of one kernel of `plan`.

    Raises RuntimeError where cuobjdump cannot read it, where neither backend nor cubin knows the threads of a block, or
    where the kernel may hang: see `sass.parted_arrivals`.
    """
    entry, text = read_entry(kernel.cubin, kernel.kernel), disassemble(kernel.cubin)
    if text is None:
        raise RuntimeError(f"cuobjdump cannot read a cubin for {plan.arch.name}: is it older than the compiler?")
    threads = kernel.threads or entry.threads
    if threads is None:
        raise RuntimeError(f"{kernel.kernel}: neither its backend nor its cubin says how many threads a block has")
    fits = occupancy(plan.arch, threads, entry.registers, entry.smem_bytes + kernel.dynamic_smem_bytes)
    code = sass.parse(text)
    if plan.backend == "cuda" and (parted := sass.parted_arrivals(code)):
        at = ", ".join(map(hex, parted))
        raise RuntimeError(f"{kernel.kernel}: lanes leave their warp to arrive at an mbarrier, at {at}: it may hang")
    found, said = mix.measure(code), remarks.parse(kernel.remarks)
    return Facts(
        kernel=kernel.kernel,
        threads=threads,
        registers=entry.registers,
        stack_bytes=entry.stack_bytes,
        static_smem_bytes=entry.smem_bytes,
        dynamic_smem_bytes=kernel.dynamic_smem_bytes,
        blocks=fits.blocks,
        share=round(fits.share, 4),
        limiter=fits.limiter,
        seconds=round(kernel.seconds, 2),
        remarks=said,
        chosen=remarks.chosen(said),
        **{it.name: getattr(found, it.name) for it in fields(found)},
    )
