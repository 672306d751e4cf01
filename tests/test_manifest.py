"""Folders of kernels ahead of time: what is written is loaded, and nothing that was changed, torn or another's."""

from __future__ import annotations

import copy
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
from aot_fakes import edit, emit, fake_cubin, problem

import multiattn
from multiattn import aot
from multiattn.aot import manifest
from multiattn.plan import abi
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import BACKENDS, Exported, get, make_plan

# ---------------------------------------------------------------- the folder


@pytest.mark.parametrize("name", BACKENDS)
def test_what_is_written_is_what_is_loaded(name, tmp_path):
    plan, binding, files = emit(tmp_path / "new", name, causal=True)
    assert [file.suffix for file in files[:3]] == [".cubin", ".ptx", ".sass"]
    assert files[-1].name == "manifest.json"
    assert any(file.name.endswith(".remarks.yaml") for file in files) == (name == "cutile")
    for path in (files[-1], files[0], files[-1].parent, str(files[0])):
        kernel = aot.load(path)
        assert kernel.plan == replace(plan, why=kernel.plan.why)
        assert kernel._try_binding(plan.problem) == binding
    assert kernel.entry["versions"] == {name: "1.2"}
    assert str(tmp_path) not in files[-1].read_text()


def test_a_folder_has_many_kernels_and_names_tell_them_apart(tmp_path):
    emit(tmp_path, "cuda")
    emit(tmp_path, "cuda")  # again: the same name
    emit(tmp_path, "triton")
    names = [entry["name"] for entry in json.loads((tmp_path / "manifest.json").read_text())["kernels"]]
    assert len(names) == 2
    assert names[0].startswith("cuda-forward-sm90-bf16-d64-full-")
    with pytest.raises(ValueError, match=f"name: got 2 forward kernels and no name; allowed {', '.join(names)}"):
        aot.load(tmp_path)
    assert aot.load(tmp_path, name=names[1]).plan.backend == "triton"
    with pytest.raises(ValueError, match="name: got 'other'; allowed cuda-forward"):
        aot.load(tmp_path, name="other")


def test_a_backward_kernel_is_not_loaded(tmp_path):
    plan = make_plan(get("cuda"), problem(), ARCHS["sm90"], direction="backward", probe=False)
    kernels = [Exported(kernel=name, seconds=0.0, cubin=fake_cubin(name, ())) for name in ("one", "two")]
    *files, _ = aot.write(tmp_path, plan, kernels, versions={})
    with pytest.raises(ValueError, match="got 0 forward kernels and no name; allowed none"):
        aot.load(tmp_path)
    with pytest.raises(ValueError, match="a backward kernel; allowed forward ones"):
        aot.load(files[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), "no such file; allowed a folder that"),
        (lambda path: path.write_text("{"), "no JSON"),
        (lambda path: path.write_text('{"schema": 7}'), "schema: got 7; allowed 2"),
        (lambda path: path.write_text("[]"), "schema: got None; allowed 2"),
        (lambda path: path.write_text("[" * 10**6), "no JSON"),
        (lambda path: path.write_text('{"schema": 2, "kernels": [1]}'), "kernels: got list; allowed a list of records"),
        (lambda path: path.write_text('{"schema": 2, "kernels": [{"name": 1}]}'), "allowed a list of records with na"),
    ],
)
def test_a_manifest_that_is_none(tmp_path, change, message):
    emit(tmp_path, "cuda")
    change(tmp_path / "manifest.json")
    with pytest.raises(ValueError, match=message):
        aot.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entry: entry.update(file="../evil.cubin"), "file: got '../evil.cubin'; allowed a file in the manifest"),
        (lambda entry: entry.update(file="/etc/passwd"), "file: got '/etc/passwd'"),
        (lambda entry: entry.update(file=""), "file: got ''"),
        (lambda entry: entry.update(file="link.cubin"), "file: got 'link.cubin'"),
        (lambda entry: entry.update(file="gone.cubin"), "gone.cubin: No such file"),
        (lambda entry: entry.update(sha256="0" * 64), r"sha256: got [0-9a-f]{64}; allowed 0{64}"),
        (lambda entry: entry.update(symbol="other"), "kernel: got 'other'; allowed what the cubin has: entry"),
        (lambda entry: entry.update(variant="old"), "variant: got 'old'; triton has "),
        (lambda entry: entry["config"].update(speed=1), r"config: got \['speed'\]; allowed tile_m"),
        (lambda entry: entry["problem"].update(window=1), r"problem: got \['window'\]; allowed batch"),
        (lambda entry: entry.update(arch="sm20"), "arch: got 'sm20'"),
        (lambda entry: entry.pop("problem"), "no 'problem'"),
        (lambda entry: entry["problem"].pop("causal"), "problem: got no 'causal'; allowed batch"),
        (lambda entry: entry.update(config=None), "config: got None; allowed a record"),
        (lambda entry: entry["config"].update(tile_m=0), "config: tile_m: got 0; allowed 1 to"),
        (lambda entry: entry["config"].update(num_warps=True), "config: num_warps: got True; allowed <class 'int'>"),
        (lambda entry: entry.update(backend="reference"), "backend: got 'reference'; allowed triton"),
        (lambda entry: entry.update(arch="cpu"), "arch: got cpu; allowed a GPU's"),
        (lambda entry: entry.update(direction="backward"), "direction: got 'backward'; allowed forward"),
        (lambda entry: entry["problem"].update(alignment=0), "alignment: got 0; allowed 2, 4, 8, 16"),
        (lambda entry: entry["problem"].update(heads_kv=0), "heads and head_dim must be at least 1"),
        (lambda entry: entry["problem"].update(strides_q="x"), "strides_q: got 'x'; allowed three integers"),
        (lambda entry: entry["problem"].update(scale=None), "causal, scale: got False, None; allowed a bool, a number"),
        (lambda entry: entry.update(launch=[]), r"launch: got \[\]; allowed a record"),
        (
            lambda entry: entry["launch"].update(dynamic_smem_bytes=None),
            "dynamic_smem_bytes: got None; allowed 0 to 23",
        ),
        (
            lambda entry: entry["launch"].update(dynamic_smem_bytes=-1),
            "dynamic_smem_bytes: got -1; allowed 0 to 232448",
        ),
        (lambda entry: entry["launch"].update(threads=0), "threads: got 0; allowed 1 to 1024"),
        (lambda entry: entry["launch"].update(threads=True), "threads: got True; allowed 1 to 1024"),
        (lambda entry: entry["launch"].update(boxes="x"), "boxes: got 'x'; allowed a list"),
        (lambda entry: entry["launch"]["boxes"][0].update(swizzle=7), "boxes: swizzle: got 7; allowed 0 to 6"),
        (lambda entry: entry["launch"]["boxes"][0].update(extents=[257]), "boxes: extents: got 257; allowed 1 to 256"),
        (lambda entry: entry["launch"]["boxes"][0].update(extents=[64]), r"got boxes of \[1, 4\] dimensions; allowed"),
        (lambda entry: entry["launch"]["constants"].update(alignment="multiple of 0"), "constant: got 'multiple of 0'"),
        (lambda entry: entry["launch"]["constants"].update(wide=True), "constants: wide: got True; allowed a string"),
        (lambda entry: entry["launch"]["constants"].update(head_dim="128"), "head_dim: got 64; allowed 128"),
        (lambda entry: entry["launch"].update(threads=512), "got 512 threads of a block; allowed 128"),
    ],
)
def test_a_manifest_that_does_not_hold(tmp_path, change, message):
    folder = tmp_path / "kernels"
    emit(folder, "triton")
    (tmp_path / "evil.cubin").write_bytes(b"")
    (folder / "link.cubin").symlink_to(tmp_path / "evil.cubin")
    name = aot.entries(folder)[0]["name"]
    edit(folder, change)
    with pytest.raises(ValueError, match=f"{name}: .*{message}"):
        aot.load(folder)


WRONG = (None, True, -1, 0, 1.5, float("nan"), 2**31 - 1, 2**70, "x", "\ud800\0", [], [-1], {}, {"x": None})


def places(value, place=()):
    """Paths to everything in a JSON value, with what holds the others."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield (*place, key)
        yield from places(value[key], (*place, key))


@pytest.mark.parametrize("name", BACKENDS)
def test_nothing_but_a_value_error_comes_of_a_wrong_manifest(name, tmp_path):
    emit(tmp_path, name, causal=True)
    path = tmp_path / "manifest.json"
    (good,) = aot.entries(tmp_path)
    refused = set()
    for *place, last in places(good):
        for wrong in (*WRONG, KeyError):
            entry = copy.deepcopy(good)
            holder = entry
            for key in place:
                holder = holder[key]
            if wrong is KeyError:
                del holder[last]
            else:
                holder[last] = wrong
            sealed = entry if last == "entry_sha256" else manifest.seal(entry)
            path.write_text(json.dumps({"schema": manifest.SCHEMA, "kernels": [sealed]}))
            try:
                aot.load(tmp_path)
            except ValueError:
                refused.add((*place, last))
            except Exception as error:
                raise AssertionError(f"{(*place, last)}: {wrong!r}") from error
    told = {
        "why",
        "versions",
        "threads",
        "registers",
        "spill_bytes",
        "static_smem_bytes",
        "dynamic_smem_bytes",
        "files",
    }
    assert {place[0] for place in set(places(good)) - refused} <= told  # what is there to be read by people


@pytest.mark.parametrize("change", [{"why": "because"}, {"threads": 64}, {"entry_sha256": None}, {"more": 1}])
def test_an_entry_that_was_changed_by_hand_is_refused(change, tmp_path):
    emit(tmp_path, "cuda")
    edit(tmp_path, lambda entry: entry.update(change), seal=lambda entry: entry)
    message = r"entry_sha256: got .*; allowed [0-9a-f]{64}: the entry was changed by hand"
    with pytest.raises(ValueError, match=message):
        aot.load(tmp_path)
    with pytest.raises(ValueError, match=message):
        aot.read_cubin(tmp_path, aot.entries(tmp_path)[0])


def test_a_cubin_whose_sections_are_damaged(monkeypatch):
    broken = {".nv.info.entry": struct.pack("<BBHI", 4, 0x17, 4, 0), ".nv.host": bytes(19)}
    monkeypatch.setattr(abi, "sections", lambda cubin: broken)
    with pytest.raises(ValueError, match="kernel: entry: what the cubin says of it is damaged"):
        abi.read_entry(b"", "entry")
    with pytest.raises(ValueError, match="cubin: got host code of 19 bytes; allowed an ELF file"):
        abi.host_of(b"")


# ---------------------------------------------------------------- who wrote it


def test_another_version_is_refused(tmp_path):
    emit(tmp_path, "triton")
    ours = f"{multiattn.__version__} \\({manifest.host_digest('triton')}\\)"
    edit(tmp_path, lambda entry: entry.update(multiattn="0.0.7"))
    with pytest.raises(ValueError, match=f"emitted by multiattn 0.0.7 .*; allowed {ours}: emit it again"):
        aot.load(tmp_path)
    edit(tmp_path, lambda entry: entry.update(multiattn=multiattn.__version__, host="0" * 12))
    with pytest.raises(
        ValueError, match=rf"{multiattn.__version__} \(host code 0{{12}}\); allowed {ours}: emit it again"
    ):
        aot.load(tmp_path)


def test_a_launch_that_is_made_otherwise_is_refused(tmp_path):
    """Swapped offsets leave the size of the struct as the cubin has it: nothing but the digest can tell."""
    folder, copied = tmp_path / "kernels", tmp_path / "other" / "multiattn"
    emit(folder, "cuda")
    shutil.copytree(manifest._ROOT, copied, ignore=shutil.ignore_patterns("__pycache__"))
    params = copied / "cuda" / "params.py"
    text = params.read_text()
    swapped = text.replace('("q", "k", "v", "out", "lse")', '("k", "q", "v", "out", "lse")')
    assert swapped != text
    code = "import sys; from multiattn import aot; aot.load(sys.argv[1]); print(aot.__file__)"
    results = []
    for content in (text, swapped):
        params.write_text(content)
        environment = {**os.environ, "PYTHONPATH": str(copied.parent)}
        command = [sys.executable, "-c", code, folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=copied.parent)
        results.append(done)
    assert results[0].stdout.strip() == str(copied / "aot" / "__init__.py"), results[0].stderr
    assert "emit it again" in results[1].stderr


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        (
            "cuda",
            {
                *("axes", "backward_configs", "bind", "configs", "launches", "params", "rules", "source", "variants"),
                *("tensor_maps", "wgmma_configs", "wgmma_rules"),
            },
        ),
        (
            "triton",
            {
                *("bind", "configs", "gluon_configs", "ladder", "parameters"),
                *("kernels/constants", "kernels/gluon/constants"),
            },
        ),
        ("cutile", {"backward_configs", "bind", "configs", "steps", "table"}),
    ],
)
def test_host_code_is_what_makes_a_binding(name, modules, monkeypatch):
    read = []
    text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, **options: read.append(path) or text(path, **options))
    assert manifest.host_digest.__wrapped__(name) == manifest.host_digest(name)
    assert {path.relative_to(manifest._ROOT).as_posix() for path in read} == {
        *(f"{name}/{module}.py" for module in modules),
        *("plan/abi.py", "plan/columns.py", "plan/schedule.py", "problem.py", "run/arguments.py"),
    }


def test_a_config_of_every_rule_can_be_loaded():
    for name in BACKENDS:
        for variant in get(name).forward.variants:
            for rule in variant.rules:
                record = {field.name: getattr(rule.config, field.name) for field in fields(rule.config)}
                assert manifest._config_of(json.loads(json.dumps(record)), variant) == rule.config


# ---------------------------------------------------------------- many writers


WRITER = """
import pathlib, sys, time
sys.path.insert(0, sys.argv[1])
import test_manifest
folder, first = pathlib.Path(sys.argv[2]), int(sys.argv[3])
(folder / f"ready{first}").touch()
while not (folder / "go").exists():
    time.sleep(0.001)
test_manifest.write_backward(folder, range(first, first + 20))
"""


def write_backward(folder, numbers):
    """Write a kernel for each of the numbers, in turn."""
    plan = make_plan(get("cuda"), problem(), ARCHS["sm90"], direction="backward", probe=False)
    for number in numbers:
        kernel = Exported(kernel=f"kernel{number}", seconds=0.0, cubin=fake_cubin(f"kernel{number}", ()))
        aot.write(folder, plan, [kernel], versions={})


def wait_for(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_processes_that_write_at_once_lose_nothing(tmp_path):
    command = [sys.executable, "-c", WRITER, Path(__file__).parent, tmp_path]
    writers = [subprocess.Popen([*command, str(first)]) for first in (0, 20)]
    wait_for(lambda: len(list(tmp_path.glob("ready*"))) == 2)
    (tmp_path / "go").touch()
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    assert {entry["symbol"] for entry in aot.entries(tmp_path)} == {f"kernel{number}" for number in range(40)}
    assert not list(tmp_path.glob("*.new"))


@pytest.mark.parametrize("with_fcntl", [True, False])
def test_threads_that_write_at_once_lose_nothing(with_fcntl, tmp_path, monkeypatch):
    monkeypatch.setattr(aot, "resource_usage", lambda cubin: None)
    if not with_fcntl:
        monkeypatch.setattr(manifest, "fcntl", None)
    start, failures = threading.Barrier(2), []

    def work(first):
        start.wait()
        try:
            write_backward(tmp_path, range(first, first + 20))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert {entry["symbol"] for entry in aot.entries(tmp_path)} == {f"kernel{number}" for number in range(40)}
    assert not list(tmp_path.glob("*.new")) + list(tmp_path.glob("*.held"))


def test_a_lock_that_stays_is_told_of(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "fcntl", None)
    monkeypatch.setattr(manifest, "_WAIT_S", 0.02)
    (tmp_path / "manifest.held").touch()
    with pytest.raises(TimeoutError, match=r"manifest\.held: there for .*: delete it if nobody writes here"):
        emit(tmp_path, "cuda")


def test_host_code_of_another_machine_is_refused(tmp_path):
    emit(tmp_path, "cutile", host=243)
    with pytest.raises(ValueError, match=r"host: got \w+; allowed ELF machine 243, whose code is in the cubin"):
        aot.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"MZ", b"\x7fELF\x02\x01", b"\x7fELF\x02\x01" + bytes(70)])
def test_what_is_no_cubin(content):
    with pytest.raises(ValueError, match=r"got .*(no 64-bit ELF file|cut off or damaged|allowed what the cubin has)"):
        abi.read_entry(content, "entry")
