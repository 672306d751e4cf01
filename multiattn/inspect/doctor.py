"""``python -m multiattn doctor``: what works on this machine, what does not and why, and the one next step."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import multiattn
from multiattn.plan import backend as registry
from multiattn.plan.arch import ARCHS, detect
from multiattn.plan.backend import BACKENDS
from multiattn.plan.measured import measured_gpus
from multiattn.plan.support import Reason
from multiattn.progress import LongWork
from multiattn.run.tuning import tuning_for

ON_CPU, COMPILE = "run on CPU tensors", "compile for any GPU"
_DEVICES = Path("/dev")
"""Where NVIDIA's driver has a file for each GPU, on Linux; containers have only those that they were given."""
_SHAPE = "--shape 2,16,4096,128 --causal"


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundDevice:
    """A GPU that torch can use."""

    device: str
    title: str
    arch: str
    is_measured: bool
    """A run on a GPU of this name is on record, the user's own or ours, by which ``backend="auto"`` goes."""

    def __str__(self) -> str:
        return f"{self.device}: {self.title}, {self.arch}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """A machine, as far as the next step depends on it."""

    devices: tuple[FoundDevice, ...]
    can: Mapping[str, Mapping[str, tuple[Reason, ...]]]
    """By backend, what it might do here, each with the reasons why it cannot; `ON_CPU` and `COMPILE` among them."""
    has_idle_driver: bool = False
    """There is a driver, and torch has no device."""
    is_linux: bool = True
    """The languages have packages for nothing else."""

    @property
    def known(self) -> tuple[FoundDevice, ...]:
        """The GPUs that kernels may be made for."""
        return tuple(it for it in self.devices if it.arch in ARCHS)

    def able(self, what: str) -> list[str]:
        """The backends that can do it."""
        return [name for name, each in self.can.items() if not each[what]]

    @property
    def incomplete(self) -> list[str]:
        """The backends that want packages, which their extras install."""
        wanting = (name for name, each in self.can.items() if any(it.hint.startswith("pip ") for it in each[COMPILE]))
        return list(wanting) if self.is_linux else []

    @property
    def outdated_driver(self) -> str:
        """Why a GPU's driver is too old for a backend that is complete; empty if none is."""
        reasons = (it for each in self.can.values() if not each[COMPILE] for why in each.values() for it in why)
        return next((f"{it.got}; it takes {it.allowed}" for it in reasons if it.code == "driver"), "")


# ---------------------------------------------------------------- the next step


@dataclass(frozen=True, kw_only=True, slots=True)
class NextStep:
    """A command to run, and why."""

    command: str
    why: str


def next_step(found: Findings) -> NextStep:
    """The step that comes first for a machine."""
    if len(found.incomplete) == len(found.can):
        return _install(("all",), "no backend has the packages that it needs")
    if found.has_idle_driver:
        return _use_driver()
    if found.incomplete:
        why = f"{' and '.join(found.incomplete)}: packages are missing, or do not fit together"
        return _install(found.incomplete, why)
    if found.outdated_driver:
        return NextStep(command="nvidia-smi", why=f"update the driver that this names: {found.outdated_driver}")
    if unmeasured := [it.title for it in found.known if not it.is_measured]:
        why = (
            f"no measurement of {unmeasured[0]} is on record, so auto goes by those of other GPUs; name your own shape"
        )
        return NextStep(command=f"python -m multiattn tune {_SHAPE}", why=why)
    if found.known:
        why = "all is well: see what runs your shape here, and why"
        return NextStep(command=f"python -m multiattn explain {_SHAPE}", why=why)
    if able := found.able(ON_CPU):
        call = f"multiattn.fmha(q, q, q, causal=True, backend='{able[0]}')"
        code = f"import torch, multiattn; q = torch.randn(1, 2, 64, 32).half(); print({call}.shape)"
        where = "no kernel is for this GPU" if found.devices else "there is no GPU"
        return NextStep(command=f'python -c "{code}"', why=f"{where}; on a CPU the same kernels are interpreted")
    if not found.is_linux:
        call = "print(multiattn.fmha(q, q, q, causal=True).shape)"
        code = f"import torch, multiattn; q = torch.randn(1, 2, 64, 32); {call}"
        why = "no backend has packages for this system; auto is the reference"
        return NextStep(command=f'python -c "{code}"', why=why)
    if found.able(COMPILE):
        command = "python -m multiattn compile --arch sm90 --head-dim 128"
        return NextStep(command=command, why="nothing runs here, but the compilers do, for every GPU")
    command = "pip install --force-reinstall 'multiattn[all]'"
    return NextStep(command=command, why="nothing works, for the reasons above")


def _install(extras: Sequence[str], why: str) -> NextStep:
    return NextStep(command=f"pip install 'multiattn[{','.join(extras)}]'", why=why)


def _use_driver() -> NextStep:
    if torch.version.cuda is None:
        why = f"this machine has NVIDIA's driver, and torch {torch.__version__} is built without CUDA"
        return NextStep(command="pip install --force-reinstall torch", why=why)
    why = f"torch {torch.__version__} is built for CUDA {torch.version.cuda} and cannot use the driver that this names"
    return NextStep(command="nvidia-smi", why=f"{why}: update the driver, or install a torch for its CUDA")


# ---------------------------------------------------------------- the command


def examine() -> Findings:
    """Ask every backend what it can do here."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.device("cuda", index) for index in range(count)]
    can = {}
    for backend in map(registry.get, BACKENDS):
        can[backend.name] = {ON_CPU: backend.probe(ARCHS["cpu"]), COMPILE: backend.probe_compiler()}
        can[backend.name] |= {f"run on {device}": backend.probe(detect(device)) for device in devices}
    return Findings(
        devices=tuple(map(_describe, devices)),
        can=can,
        has_idle_driver=not devices and _has_driver(),
        is_linux=platform.system() == "Linux",
    )


def _has_driver() -> bool:
    """True if there is a GPU with NVIDIA's driver that nobody has hidden."""
    return "CUDA_VISIBLE_DEVICES" not in os.environ and any(_DEVICES.glob("nvidia[0-9]*"))


def _describe(device: torch.device) -> FoundDevice:
    title, arch = torch.cuda.get_device_name(device), detect(device).name
    is_measured = title in measured_gpus(arch) or tuning_for(device) is not None
    return FoundDevice(device=str(device), title=title, arch=arch, is_measured=is_measured)


def report(found: Findings) -> dict[str, Any]:
    """The findings as plain data, with the versions of all that decides them."""
    backends = {
        name: {
            "summary": registry.get(name).summary,
            "versions": dict(registry.get(name).versions()),
            "can": {what: [str(reason) for reason in reasons] for what, reasons in can.items()},
        }
        for name, can in found.can.items()
    }
    return {
        "multiattn": multiattn.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "devices": [str(device) for device in found.devices],
        "backends": backends,
        "next": asdict(next_step(found)),
    }


def lines(told: Mapping[str, Any]) -> Iterator[str]:
    """A report as a terminal shows it."""
    yield f"multiattn {told['multiattn']}, torch {told['torch']}, Python {told['python']}, {told['platform']}"
    yield from (f"  {device}" for device in told["devices"] or ["no GPU that torch can use"])
    for name, entry in told["backends"].items():
        yield f"\n{name}: {entry['summary']}"
        yield "  " + ", ".join(f"{package} {version or 'missing'}" for package, version in entry["versions"].items())
        for what, reasons in entry["can"].items():
            yield f"  {what}: {'no' if reasons else 'yes'}"
            yield from (f"    {reason}" for reason in reasons)
    yield f"\nNext: {told['next']['command']}\n  {told['next']['why']}"


def run(options: argparse.Namespace) -> int:
    """Print what each backend can do on this machine, and every reason why not; 1 where nothing can be done."""
    with LongWork("looking at this machine", kind="doctor"):
        found = examine()
        told = report(found)
    print(json.dumps(told, indent=2) if options.json else "\n".join(lines(told)))
    works = any(not reasons for can in found.can.values() for reasons in can.values())
    return int(not works and not options.json)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    command.add_argument("--json", action="store_true", help="print the findings as JSON")
