"""Kernels compiled ahead of time: a folder of cubins with a manifest, and the loader that runs them.

The loader needs torch and NVIDIA's driver, but no kernel language and no compiler. A kernel runs every problem that its
code holds for. The manifest says what the code is specialised on, and `Kernel` checks it.
"""

from __future__ import annotations

import hashlib
import platform
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

import multiattn
from multiattn.aot import manifest
from multiattn.aot.binding import bind, launches_digest
from multiattn.layout import Layout
from multiattn.operands import Operands
from multiattn.plan import abi, cubin
from multiattn.plan import backend as registry
from multiattn.plan.arch import detect
from multiattn.plan.backend import Exported, Plan
from multiattn.plan.records import record_of
from multiattn.problem import Problem, options_of
from multiattn.run import driver
from multiattn.run.calls import fill_empty
from multiattn.run.counters import counter_lender
from multiattn.run.execute import as_fp32, on_device
from multiattn.run.launch import DriverLauncher, LoadedKernel, Workspace
from multiattn.score import Captured
from multiattn.validate import as_float
from multiattn.validate.results import check_laid_out

_KEPT = 256  # launchers of a kernel; a serving loop with ever-changing lengths must not grow for ever


# ---------------------------------------------------------------- writing


def write(folder: Path, plan: Plan, exported: Sequence[Exported]) -> tuple[Path, ...]:
    """Write the kernels of a Plan into a folder, beside those of its manifest; return the files, manifest last.

    `exported` is the result of the plan's `Op.export`.

    Raises:
        ValueError: The folder has a manifest that cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    entries: list[dict[str, Any]] = []
    for index, kernel in enumerate(exported):
        name = _name(plan, kernel, index if len(exported) > 1 else None)
        files = {"cubin": kernel.cubin, **kernel.texts}
        if kernel.remarks:
            files["remarks.yaml"] = kernel.remarks.encode()
        for kind, content in files.items():
            path = folder / f"{name}.{kind}"
            path.write_bytes(content)
            written.append(path)
        entries.append(_entry(name, plan, kernel, files))
    return *written, manifest.update(folder, entries)


def _name(plan: Plan, kernel: Exported, index: int | None) -> str:
    """A kernel's name in its folder: what it is for, and a part of its hash, as one problem has many kernels."""
    problem = plan.problem
    parts = [plan.backend, plan.direction, plan.arch.name, problem.dtype, problem.widths_in_names, problem.mask]
    parts += [] if problem.score is None else [f"score{problem.score.program.digest[:8]}"]
    parts += [] if problem.packing is None else ["packed"]
    parts += [] if index is None else [str(index)]
    return "-".join((*parts, hashlib.sha256(kernel.cubin).hexdigest()[:8]))


def _entry(name: str, plan: Plan, kernel: Exported, kinds: Iterable[str]) -> dict[str, Any]:
    """The record of a kernel in the manifest. Sizes are in bytes."""
    launch = None
    if (binding := kernel.binding) is not None:
        digest = launches_digest(plan, binding.image, binding.constants)
        launch = manifest.Launch(image=binding.image, constants=dict(binding.constants), sha256=digest)
    return {
        "name": name,
        "multiattn": multiattn.__version__,
        "file": f"{name}.cubin",
        "sha256": hashlib.sha256(kernel.cubin).hexdigest(),
        "symbol": kernel.kernel,
        "backend": plan.backend,
        "direction": plan.direction,
        "variant": plan.variant,
        "arch": plan.arch.name,
        "problem": manifest.problem_record(plan.problem),
        "config": None if plan.config is None else asdict(plan.config),
        "why": plan.why,
        "versions": dict(registry.get(plan.backend).versions()),
        "threads": kernel.threads,
        "dynamic_smem_bytes": kernel.dynamic_smem_bytes,
        "files": {kind: f"{name}.{kind}" for kind in kinds},
        "launch": launch and asdict(launch),
    }


# ---------------------------------------------------------------- reading


def load(path: Path | str, *, name: str | None = None) -> Kernel:
    """Load a kernel that was written ahead of time, to call it on tensors of any problem that it can run.

    Args:
        path: The folder, its manifest, or the kernel's cubin.
        name: The kernel's name in the manifest. None if the folder has only one forward kernel.

    Raises:
        ValueError: A folder or a kernel cannot be loaded; the message says what came and what is allowed.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    if path.suffix == ".cubin":
        name = path.stem if name is None else name
    entry = _find(manifest.read(folder), name)
    where = f"{folder / manifest.MANIFEST}: {entry['name']}"
    try:
        code = read_cubin(folder, entry)
        if entry["multiattn"] != (here := multiattn.__version__):
            raise ValueError(f"emitted by multiattn {entry['multiattn']}; allowed {here}, which is here: emit it again")
        return Kernel(entry, code)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    except KeyError as error:
        raise ValueError(f"{where}: no {error}") from None
    except (ArithmeticError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(f"{where}: damaged ({error})") from error


def _find(entries: Sequence[Mapping[str, Any]], name: str | None) -> Mapping[str, Any]:
    forward = [entry for entry in entries if entry.get("launch") is not None]
    names = ", ".join(str(entry["name"]) for entry in forward) or "none: the folder has no forward kernel"
    found = forward if name is None else [entry for entry in entries if entry["name"] == name]
    packed = [entry for entry in (entries if name is None else found) if _is_packed(entry)]
    if packed and (name is not None or not forward):
        kernels = ", ".join(str(entry["name"]) for entry in packed)
        raise ValueError(f"packing: got {kernels}, of a packed batch; allowed kernels of batches [B, H, S, D]")
    if len(found) != 1:
        got = f"{len(found)} forward kernels and no name" if name is None else repr(name)
        raise ValueError(f"name: got {got}; allowed {names}")
    if found[0].get("launch") is None or found[0].get("direction") != "forward":
        raise ValueError(f"name: got {found[0]['name']!r}, a {found[0].get('direction')} kernel; allowed {names}")
    return found[0]


def _is_packed(entry: Mapping[str, Any]) -> bool:
    problem = entry.get("problem")
    batching = problem.get("batching") if isinstance(problem, dict) else None
    return isinstance(batching, list | dict) and "packed" in batching


def read_cubin(folder: Path, entry: Mapping[str, Any]) -> bytes:
    """The cubin of an entry: a file of the folder itself; ValueError where either is not as it was written."""
    file = entry["file"]
    path = folder / str(file)
    if not isinstance(file, str) or Path(file).name != file or path.resolve().parent != folder.resolve():
        raise ValueError(f"file: got {file!r}; allowed a file in the manifest's own folder")
    try:
        code = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    digest = hashlib.sha256(code).hexdigest()
    if digest != entry["sha256"]:
        raise ValueError(f"{path}: sha256: got {digest}; allowed {entry['sha256']}, as the manifest has it")
    return code


# ---------------------------------------------------------------- running


class Kernel:
    """A forward kernel that was compiled ahead of time.

    Several threads may use it, on any stream and device of its arch. The first call on a device loads the code; after
    that, calls can be captured in a CUDA graph. The code stays loaded for the life of the process, because a launch or
    a graph may use it.
    """

    def __init__(self, entry: Mapping[str, Any], code: bytes) -> None:
        self.entry = entry
        """Its record in the manifest."""
        self.name = str(entry["name"])
        self.plan = manifest.plan_of(entry)
        """The Plan that it was compiled for."""
        launch = record_of(manifest.Launch, entry["launch"], "launch")
        self._image, self._constants = launch.image, launch.constants
        self._code = code
        self._entry = cubin.read_entry(code, str(entry["symbol"]))
        if (host := cubin.host_of(code)) not in (None, platform.machine()):
            raise ValueError(f"host: got {platform.machine()}; allowed {host}, whose code is in the cubin")
        self._launchers: dict[tuple[Problem, int], DriverLauncher] = {}
        self._try_binding(self.plan.problem)
        if launches_digest(self.plan, self._image, self._constants) != launch.sha256:
            raise ValueError(
                "launch: multiattn hands this kernel other arguments than it was compiled for: emit it again"
            )

    def __repr__(self) -> str:
        return f"Kernel({self.name}: {self.plan})"

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
        scalars: Mapping[str, float] = MappingProxyType({}),
        captured: Sequence[torch.Tensor] = (),
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Attention with the mask that the kernel was compiled for, on the current stream of the tensors' device.

        Args:
            q: ``[B, Hq, Sq, D]`` in the dtype of the kernel; any strides with unit stride on D.
            k: ``[B, Hkv, Skv, D]``, where Hkv divides Hq.
            v: ``[B, Hkv, Skv, Dv]``.
            scale: The scale of the scores. None is ``1/sqrt(D)``.
            sinks: ``[Hq]``, if the kernel was compiled for them.
            scalars: The numbers of the change of scores that the kernel was compiled for, by name: ``softcap``.
            captured: The tensors that it loads from, by slot: ALiBi's slopes, bias, then those that `score_mod`
                captures, in the order of `ScoreProgram.tensors`. Any strides, and any sizes that the call's indices
                stay in.
            out: A tensor to write to: ``[B, Hq, Sq, Dv]``, strides ``Problem.strides_out``. None is a fresh one.
            lse: A tensor to write to: fp32 ``[B, Hq, Sq]``, contiguous. None is a fresh one.

        Returns:
            (out, lse) as from `multiattn.fmha`, without gradients; behind them the largest scores, if the kernel was
            compiled for them.

        Raises:
            TypeError, ValueError: This kernel cannot run these tensors; the message says what came and what is allowed.
        """
        numbers = self._check_score(scalars, captured)
        given = Operands(q, k, v, sinks=sinks, captured=tuple(captured))
        problem = Problem.of_operands(given, options_of(self.plan.problem)._replace(scale=scale, scalars=numbers))
        problem = problem.as_read_by(self.plan.problem)
        self._check(problem, q.device)
        if torch.is_grad_enabled() and given.requires_grad:
            raise ValueError("gradients: got tensors that require them; allowed a call in torch.no_grad()")
        named = zip(problem.forward_results, (out, lse, None), strict=False)
        results: dict[str, Any] = {name: _result(name, it, problem.layouts[name], q.device) for name, it in named}
        if problem.is_empty:
            return tuple(results.values())
        operands = given._replace(**results, sinks=as_fp32(sinks))
        if problem.seq_kv == 0:
            fill_empty(operands)
            return tuple(results.values())
        with on_device(q.device):
            self._launcher(problem, q.device.index or 0)(operands)
        return tuple(results.values())

    def _check_score(self, scalars: Mapping[str, float], captured: Sequence[torch.Tensor]) -> tuple[float, ...]:
        """The numbers in the program's order; ValueError or TypeError for other numbers or tensors than it takes."""
        score = self.plan.problem.score
        names, tensors = ((), ()) if score is None else (score.program.scalars, score.program.tensors)
        if set(scalars) != set(names):
            got, allowed = (", ".join(it) or "none" for it in (scalars, names))
            raise ValueError(f"{self.name}: scalars: got {got}; allowed {allowed}")
        found = [str(Captured(dtype=it.dtype, rank=it.dim())) for it in captured]
        if found != [*map(str, tensors)]:
            got, allowed = (", ".join(it) or "none" for it in (found, map(str, tensors)))
            raise ValueError(f"{self.name}: captured: got {got}; allowed {allowed}")
        return tuple(as_float(scalars[name], name) for name in names)

    def _check(self, problem: Problem, device: torch.device) -> None:
        """ValueError where no length and no stride could make these tensors fit."""
        allowed, here = self.plan.problem, detect(device).name
        found = (
            ("arch", here, self.plan.arch.name),
            ("dtype", problem.dtype, allowed.dtype),
            ("head_dim", problem.head_dim, allowed.head_dim),
            ("head_dim_v", problem.head_dim_v, allowed.head_dim_v),
            ("v_in_k", problem.v_in_k, allowed.v_in_k),
            ("sinks", problem.has_sinks, allowed.has_sinks),
        )
        if wrong := [f"{what}: got {got}; allowed {ours}" for what, got, ours in found if got != ours]:
            raise ValueError(f"{self.name} cannot run these tensors: {'; '.join(wrong)}")

    def _launcher(self, problem: Problem, device: int) -> DriverLauncher:
        """The launcher for a problem on a device, the current one; ValueError where the code does not hold for it."""
        key = (problem, device)
        if (known := self._launchers.get(key)) is not None:
            return known
        try:
            binding = self._try_binding(problem)
        except ValueError as error:
            raise ValueError(f"{self.name} cannot run these tensors: {error}") from None
        smem_bytes = self._image.dynamic_smem_bytes
        function = driver.load_kernel(self._code, self._entry.symbol, device, dynamic_smem_bytes=smem_bytes)
        size = binding.workspace_bytes
        workspace = Workspace(lend=counter_lender(device, size)) if size else None
        made = DriverLauncher([LoadedKernel(function=function, binding=binding)], device, workspace)
        if len(self._launchers) >= _KEPT:
            self._launchers.clear()
        self._launchers[key] = made
        return made

    def _try_binding(self, problem: Problem) -> abi.Binding:
        """The launch for a problem, checked against the cubin; ValueError where the code does not hold for it."""
        binding = bind(self.plan, problem, self._image, self._constants)
        abi.check(binding, self._entry)
        return binding


def _result(name: str, given: torch.Tensor | None, layout: Layout, device: torch.device) -> torch.Tensor:
    """A fresh result, or the caller's own if a kernel can write it; TypeError or ValueError if not."""
    if given is None:
        return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device=device)
    check_laid_out(name, given, layout, device)
    return given
