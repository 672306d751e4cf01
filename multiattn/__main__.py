"""``python -m multiattn``: what works here, what would run, what to expect of it, and what it waits for."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from multiattn.inspect import cli, doctor, ncu, roofline
from multiattn.inspect.layout import SharedTile, describe
from multiattn.inspect.layout_svg import draw
from multiattn.inspect.options import add_problem, called_problem, default_arch
from multiattn.operands import Options
from multiattn.plan import backend as registry
from multiattn.plan.arch import ARCHS, Arch, detect
from multiattn.plan.backend import BACKENDS, DIRECTIONS, Backend, Direction, Plan, TunedChoice, make_plan, plan_tuned
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
    """Print the plan of each variant, by direction and backend, with what was passed over; or why there is none."""
    problem, arch = called_problem(options), ARCHS[options.arch]
    tuning = _tuning_here(arch)
    able = 0
    for direction in DIRECTIONS if options.direction == "both" else (options.direction,):
        print(f"{problem} {direction} on {arch.name} ({arch.title})")
        _print_auto(problem, arch, direction, tuning)
        for name in options.backend or BACKENDS:
            backend = registry.get(name)
            print()
            tuned = () if tuning is None else tuning.choices(problem, direction, name)
            _print_default(backend, problem, arch, direction, tuned)
            for variant in backend.op(direction).offered:
                plan = plan_tuned(backend, variant, problem, arch, tuned, direction=direction)
                if isinstance(plan, Plan):
                    able += 1
                    print(plan.describe())
                else:
                    print(f"{name} {direction}, variant {variant.name}: no")
                    _print_reasons(plan)
        print()
    return 0 if able else 1


def _tuning_here(arch: Arch) -> Tuning | None:
    """The user's own measurements of this machine's GPU, if a problem is explained for its arch."""
    return tuning_for(torch.device("cuda")) if _is_here(arch) else None


def _is_here(arch: Arch) -> bool:
    """True for the arch of this machine's GPU."""
    return torch.cuda.is_available() and detect(torch.device("cuda")) == arch


def _print_auto(problem: Problem, arch: Arch, direction: Direction, tuning: Tuning | None) -> None:
    """Print what ``backend="auto"`` takes, and why: on this machine's GPU of what is installed here."""
    if arch.is_gpu:
        with contextlib.suppress(Unsupported):
            (plan,) = choose(problem, arch, Options(), direction, probe=_is_here(arch), tuning=tuning)
            print(f"auto takes {plan.backend}, variant {plan.variant}: {plan.why}")


def _print_default(
    backend: Backend, problem: Problem, arch: Arch, direction: Direction, tuned: Sequence[TunedChoice]
) -> None:
    """Print the variants that run where the caller names none."""
    chosen = []
    for deterministic in (False, True):
        with contextlib.suppress(Unsupported):
            plan = make_plan(
                backend, problem, arch, direction=direction, deterministic=deterministic, probe=False, tuned=tuned
            )
            chosen.append(plan.variant)
    if chosen:
        also = f"; deterministic: {chosen[-1]}" if len(set(chosen)) > 1 else ""
        print(f"{backend.name} {direction} takes {chosen[0]}{also}")


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
    commands = parser.add_subparsers(required=True, dest="command")

    command = commands.add_parser("doctor", help="what works on this machine, what does not and why, and the next step")
    doctor.add_arguments(command)
    command.set_defaults(run=doctor.run)

    command = commands.add_parser("explain", help="the plan for a problem, or why there is none")
    add_problem(command, required=True)
    command.add_argument("--arch", choices=tuple(ARCHS), default=default_arch(), help="default: %(default)s")
    command.add_argument("--direction", choices=(*DIRECTIONS, "both"), default="forward", help="default: %(default)s")
    command.add_argument("--backend", action="append", choices=BACKENDS, help="may be given again; default: all")
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
