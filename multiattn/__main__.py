"""``python -m multiattn``: what works here, what would run, what to expect of it, and what it waits for."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from multiattn import __version__
from multiattn.inspect import cli, doctor, ncu, roofline
from multiattn.inspect.layout import SharedTile, describe
from multiattn.inspect.layout_svg import draw
from multiattn.inspect.options import (
    Command,
    add_backends,
    add_problem,
    arch_name,
    called_problem,
    counts_of_blocks,
    default_arch,
    directions_of,
)
from multiattn.operands import Options
from multiattn.plan import backend as registry
from multiattn.plan.arch import ARCHS, Arch, detect
from multiattn.plan.backend import BACKENDS, DIRECTIONS, Direction, Plan, plan_tuned
from multiattn.plan.choice import choose
from multiattn.plan.support import Reason, Unsupported
from multiattn.plan.tuning import Tuning
from multiattn.problem import Problem
from multiattn.run.tuning import tuning_for
from multiattn.tune import cli as tune


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0 when something works, 1 when nothing does, 2 for wrong options."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        return status
    except BrokenPipeError:  # as of `| head`: what is left to print would fail again when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, Unsupported) as error:
        print(f"python -m multiattn {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted", file=sys.stderr)
        return 130


# ---------------------------------------------------------------- explain


def explain(options: argparse.Namespace) -> int:
    """Print what runs and why, then what each backend would run; with ``--verbose`` every variant and what it rejects.

    1 where nothing can run the problem.
    """
    problem, arch = called_problem(options), ARCHS[options.arch]
    asked = Explained(problem=problem, arch=arch, tuning=_tuning_here(arch), variant=options.variant)
    able = [asked.show(way, options.backend, is_long=options.verbose) for way in directions_of(options)]
    return int(not any(able))


@dataclass(frozen=True, kw_only=True, slots=True)
class Explained:
    """One problem on one arch, to be explained in each direction."""

    problem: Problem
    arch: Arch
    tuning: Tuning | None
    """The user's own measurements of this machine's GPU, if that is the arch."""
    variant: str | None
    """The variant that the caller names, with a backend; None: any."""

    def show(self, direction: Direction, backends: Sequence[str] | None, *, is_long: bool) -> bool:
        """Print the answer for one direction; True if anything can run it."""
        print(f"{self.problem} {direction} on {self.arch.name} ({self.arch.title})")
        if self.problem.blocks is not None:
            print(f"blocks of a causal block mask: {counts_of_blocks(self.problem)}")
        is_chosen = not backends and self.variant is None
        if is_chosen:
            self._print_auto(direction)
        plans = {name: self._take(name, direction) for name in backends or BACKENDS}
        for name, plan in plans.items():
            print()
            if is_long:
                self._print_variants(name, direction)
            elif not isinstance(plan, Plan):
                print(f"{name} {direction}: no")
                _print_reasons(plan)
            elif is_chosen:
                print(f"{name} {direction}, variant {plan.variant}: {plan.config or 'no config'}\n  why: {plan.why}")
                self._print_deterministic(plan)
            else:
                print(plan.describe(rejected=False))
                self._print_deterministic(plan)
        told = "" if is_long else "--verbose prints every variant, and the rules and variants that were passed over\n"
        print(f"\n{told}")
        return any(isinstance(plan, Plan) for plan in plans.values())

    def _print_auto(self, direction: Direction) -> None:
        """Print what ``backend="auto"`` takes, and why; of what is installed here on this machine's GPU."""
        taken = self._take("auto", direction)
        if isinstance(taken, Plan):
            print(f"auto takes {taken.describe(rejected=False)}")
        else:
            print('auto takes none; backend="reference" runs it, eagerly')

    def _take(self, backend: str, direction: Direction, *, deterministic: bool = False) -> Plan | tuple[Reason, ...]:
        """The Plan of a call with this backend: on this machine's GPU ``"auto"`` takes what is installed here."""
        asked = Options(backend=backend, variant=self.variant, deterministic=deterministic)
        probe = backend == "auto" and _is_here(self.arch)
        try:
            return choose(self.problem, self.arch, asked, direction, probe=probe, tuning=self.tuning)[0]
        except Unsupported as error:
            return error.reasons

    def _print_deterministic(self, plan: Plan) -> None:
        """Print the variant that runs where callers ask for the same bits each time, if it is another."""
        other = self._take(plan.backend, plan.direction, deterministic=True)
        if isinstance(other, Plan) and other.variant != plan.variant:
            print(f"  deterministic=True: variant {other.variant}, {other.config}")

    def _print_variants(self, name: str, direction: Direction) -> None:
        """Print the plan of each variant that a backend offers, with what was passed over, or why there is none."""
        backend = registry.get(name)
        tuned = () if self.tuning is None else self.tuning.choices(self.problem, direction, name)
        taken = self._take(name, direction)
        if isinstance(taken, Plan):
            print(f"{name} {direction} takes {taken.variant}")
            self._print_deterministic(taken)
        op = backend.op(direction)
        variants = op.offered if self.variant is None else (registry.find_variant(backend, self.variant, direction),)
        for variant in variants:
            plan = plan_tuned(backend, variant, self.problem, self.arch, tuned, direction=direction)
            if isinstance(plan, Plan):
                print(plan.describe())
            else:
                print(f"{name} {direction}, variant {variant.name}: no")
                _print_reasons(plan)


def _tuning_here(arch: Arch) -> Tuning | None:
    """The user's own measurements of this machine's GPU, if a problem is explained for its arch."""
    return tuning_for(torch.device("cuda")) if _is_here(arch) else None


def _is_here(arch: Arch) -> bool:
    """True for the arch of this machine's GPU."""
    return torch.cuda.is_available() and detect(torch.device("cuda")) == arch


def _print_reasons(reasons: Iterable[Reason | str]) -> None:
    for reason in reasons:
        print(f"    {reason}")


# ---------------------------------------------------------------- layout


def layout(options: argparse.Namespace) -> int:
    """Print the banks that a tile of the CUDA kernels falls in, and its conflicts."""
    tile = SharedTile.parse(options.tile, options.swizzle)
    if options.svg is not None:
        options.svg.write_text(draw(tile))
    print(describe(tile, elements=options.elements))
    return 0


# ---------------------------------------------------------------- arguments


def _parser() -> argparse.ArgumentParser:
    what = "What works here, what would run, what to expect of it, and what it waits for."
    parser = argparse.ArgumentParser(prog="python -m multiattn", description=what)
    parser.add_argument("--version", action="version", version=f"multiattn {__version__}")
    commands = parser.add_subparsers(required=True, dest="command", parser_class=Command)

    command = commands.add_parser("doctor", help="what works on this machine, what does not and why, and the next step")
    doctor.add_arguments(command)
    command.set_defaults(run=doctor.run)

    command = commands.add_parser("explain", help="the plan for a problem, or why there is none")
    add_problem(command, required=True)
    told = f"of {', '.join(ARCHS)}, or a GPU's name; default: %(default)s"
    command.add_argument("--arch", type=arch_name, default=default_arch(), help=told)
    command.add_argument("--direction", choices=(*DIRECTIONS, "both"), default="forward", help="default: %(default)s")
    add_backends(command)
    command.add_argument("--variant", metavar="NAME", help="of the backend; default: its best")
    command.add_argument("--verbose", action="store_true", help="print every variant, and the rules passed over")
    command.set_defaults(run=explain)

    command = commands.add_parser("compile", help="compile plans for every target; needs no GPU")
    cli.add_arguments(command)
    command.set_defaults(run=cli.run)

    command = commands.add_parser("roofline", help="the least time that a problem takes on a device, and why")
    roofline.add_arguments(command)
    command.set_defaults(run=roofline.run)

    command = commands.add_parser("ncu", help="profile a plan with Nsight Compute: what its kernels wait for")
    ncu.add_arguments(command)
    command.set_defaults(run=ncu.run)

    command = commands.add_parser(
        "tune", help="measure what runs your shapes fastest on this GPU, and keep it for calls"
    )
    tune.add_arguments(command)

    command = commands.add_parser("layout", help="the banks of shared memory that a CUDA kernel's tile falls in")
    command.add_argument("--tile", required=True, metavar="ROWSxCOLUMNS", help="of 16-bit elements, as in 64x64")
    swizzle = "of the chunk index that are XORed: 0 to 3, or auto, as the kernels do; default: %(default)s"
    command.add_argument("--swizzle", default="auto", metavar="BITS", help=swizzle)
    command.add_argument("--elements", action="store_true", help="a bank for each pair of elements, not for each chunk")
    command.add_argument("--svg", type=Path, metavar="FILE", help="draw it there as well")
    command.set_defaults(run=layout)
    return parser


if __name__ == "__main__":
    sys.exit(main())
