"""Folders of kernels ahead of time: what is written is loaded, and nothing that was changed, torn or another's."""

from __future__ import annotations

import copy
import ctypes
import itertools
import json
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from aot_fakes import edit, emit, fake_cubin, problem

import multiattn
from multiattn import aot
from multiattn.aot import manifest
from multiattn.cuda import forward_mma
from multiattn.plan import cubin
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import BACKENDS, DIRECTIONS, Exported, get, make_plan

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
    assert kernel.entry["versions"] == dict(get(name).versions())
    assert str(tmp_path) not in files[-1].read_text()


def test_a_folder_has_many_kernels_and_names_tell_them_apart(tmp_path):
    emit(tmp_path, "cuda")
    emit(tmp_path, "cuda")  # again: the same name
    emit(tmp_path, "triton")
    names = [entry["name"] for entry in manifest.read(tmp_path)]
    assert len(names) == 2
    assert names[0].startswith("cuda-forward-sm90-bf16-d64-full-")
    with pytest.raises(ValueError, match=f"name: got 2 forward kernels and no name; allowed {', '.join(names)}"):
        aot.load(tmp_path)
    assert aot.load(tmp_path, name=names[1]).plan.backend == "triton"
    with pytest.raises(ValueError, match="name: got 'other'; allowed cuda-forward"):
        aot.load(tmp_path, name="other")


def write_backward(folder, numbers):
    """Write a kernel for each of the numbers, in turn."""
    plan = make_plan(get("cuda"), problem(), ARCHS["sm90"], direction="backward", probe=False)
    for number in numbers:
        kernel = Exported(kernel=f"kernel{number}", seconds=0.0, cubin=fake_cubin(f"kernel{number}", ()))
        aot.write(folder, plan, [kernel])


def test_a_backward_kernel_is_not_loaded(tmp_path):
    write_backward(tmp_path, range(2))
    with pytest.raises(ValueError, match="got 0 forward kernels and no name; allowed none"):
        aot.load(tmp_path)
    with pytest.raises(ValueError, match="a backward kernel; allowed none"):
        aot.load(next(tmp_path.glob("*.cubin")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file; allowed a folder that"),
        ("{", "no JSON"),
        ('{"schema": 4}', "schema: got 4; allowed 5: emit into a new folder"),
        ("[]", "schema: got None; allowed 5"),
        ('{"schema": 5, "kernels": [{"name": 1}]}', "kernels: got list; allowed a list of records with names"),
    ],
)
def test_a_manifest_that_is_none(tmp_path, text, message):
    emit(tmp_path, "cuda")
    (tmp_path / "manifest.json").unlink()
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        aot.load(tmp_path)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("file", "../evil.cubin", "file: got '../evil.cubin'; allowed a file in the manifest"),
        ("file", "link.cubin", "file: got 'link.cubin'"),
        ("file", "gone.cubin", "gone.cubin: No such file"),
        ("sha256", "0" * 64, r"sha256: got [0-9a-f]{64}; allowed 0{64}"),
        ("symbol", "other", "kernel: got 'other'; allowed what the cubin has: entry"),
        ("multiattn", "0.0.7", f"emitted by multiattn 0.0.7; allowed {multiattn.__version__}.*: emit it again"),
        ("variant", "old", "variant: got 'old'; triton has "),
        ("backend", "reference", "backend: got 'reference'; allowed triton"),
        ("arch", "cpu", "arch: got cpu; allowed a GPU's"),
        ("direction", "backward", "name: got .*, a backward kernel"),
        ("config", None, "config: got None; allowed a record"),
        ("config.warps", True, "config: warps: got True; allowed <class 'int'>"),
        ("problem.band", KeyError, "problem: got no band; allowed batch"),
        ("problem.strides_q", "x", "problem: strides_q: got 'x'; allowed tuple"),
        ("problem.batch", 2**70, "problem: batch: got 1180591620717411303424; allowed 0 to 2147483647"),
        ("launch.image.boxes.0.extents", [64], r"got boxes of \[1, 4\] dimensions; allowed"),
        ("launch.image.threads", 512, "got 512 threads of a block; allowed 128"),
        ("launch.constants.alignment", "multiple of 0", "constant: got 'multiple of 0'"),
        ("launch.constants.head_dim", "128", "head_dim: got 64; allowed 128"),
        ("launch.sha256", "0" * 64, "hands this kernel other arguments than it was compiled for: emit it again"),
    ],
)
def test_a_manifest_that_does_not_hold(tmp_path, place, value, message):
    folder = tmp_path / "kernels"
    emit(folder, "triton")
    (tmp_path / "evil.cubin").write_bytes(b"")
    (folder / "link.cubin").symlink_to(tmp_path / "evil.cubin")
    keys = [int(key) if key.isdecimal() else key for key in place.split(".")]
    edit(folder, lambda entry: put(entry, keys, value))
    with pytest.raises(ValueError, match=message):
        aot.load(folder)


def put(entry, keys, value):
    """Set what is at a path of keys; delete it for KeyError."""
    *holders, last = keys
    for key in holders:
        entry = entry[key]
    if value is KeyError:
        del entry[last]
    else:
        entry[last] = value


def places(value, place=()):
    """Paths to everything in a JSON value, with what holds the others."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield (*place, key)
        yield from places(value[key], (*place, key))


def test_nothing_but_a_value_error_comes_of_a_wrong_manifest(tmp_path):
    emit(tmp_path, "triton", causal=True)
    path = tmp_path / "manifest.json"
    (good,) = manifest.read(tmp_path)
    refused = set()
    for place in places(good):
        for wrong in (KeyError, None, -1, 0, float("nan"), 2**31 - 1, 2**70, "\ud800\0", [-1], {"x": None}):
            entry = copy.deepcopy(good)
            put(entry, place, wrong)
            path.write_text(json.dumps({"schema": manifest.SCHEMA, "kernels": [entry]}))
            try:
                aot.load(tmp_path)
            except ValueError:
                refused.add(place)
            except Exception as error:
                raise AssertionError(f"{place}: {wrong!r}") from error
    sizes = {"threads", "registers", "spill_bytes", "static_smem_bytes", "dynamic_smem_bytes"}
    told = {"why", "versions", "files", *sizes}  # what is there to be read by people
    assert {place[0] for place in set(places(good)) - refused} <= told


def test_a_config_of_every_rule_can_be_loaded():
    for name, direction in itertools.product(BACKENDS, DIRECTIONS):
        for variant in get(name).op(direction).variants:
            for rule in variant.rules:
                told, old = asdict(rule.config), asdict(rule.config)
                if name == "cutile":  # beside each other, as they were
                    old |= {f"dq_{it}": value for it, value in old.pop("dq", {}).items()}
                if variant.name == "wgmma_two_pass":
                    fields = {"k_stages": "k_stages", "v_stages": "v_stages", "ahead": "dq_ahead", "dp_late": "dp_late"}
                    old |= {fields[it]: value for it, value in old.pop("dq").items() if it in fields}
                old = json.dumps(old).replace("blocks_per_sm", "occupancy")  # as it was called
                if name == "cutile":
                    old = old.replace('warps"', 'num_worker_warps"')
                for config in (told, json.loads(old)):
                    assert manifest.config_of(config, variant) == rule.config
                    for absent in config:
                        with pytest.raises(ValueError, match=r"config: (dq: )?got no "):
                            manifest.config_of({it: config[it] for it in config if it != absent}, variant)


# ---------------------------------------------------------------- the launch


def test_a_launch_that_is_made_otherwise_is_refused(tmp_path, monkeypatch):
    """Swapped offsets leave the size of the struct as the cubin has it: nothing but the digest can tell."""
    emit(tmp_path, "cuda", arch="sm80")
    aot.load(tmp_path)
    (first, *_), (second, *_), *rest = forward_mma.ForwardParams._fields_

    class Swapped(ctypes.Structure):
        _fields_ = ((second, ctypes.c_void_p), (first, ctypes.c_void_p), *rest)

    monkeypatch.setattr(forward_mma, "ForwardParams", Swapped)
    with pytest.raises(ValueError, match="hands this kernel other arguments than it was compiled for: emit it again"):
        aot.load(tmp_path)


# ---------------------------------------------------------------- many writers


WRITER = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
import test_manifest
folder = pathlib.Path(sys.argv[2])
(folder / "ready").touch()
test_manifest.write_backward(folder, range(20))
"""


def test_processes_and_threads_that_write_at_once_lose_nothing(tmp_path):
    writer = subprocess.Popen([sys.executable, "-c", WRITER, Path(__file__).parent, tmp_path])
    while not (tmp_path / "ready").exists():
        time.sleep(0.001)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(write_backward, [tmp_path] * 2, (range(20, 40), range(40, 60))))
    assert writer.wait(timeout=180) == 0
    assert {entry["symbol"] for entry in manifest.read(tmp_path)} == {f"kernel{number}" for number in range(60)}
    assert not list(tmp_path.glob("*.new"))


# ---------------------------------------------------------------- the cubin


def test_host_code_of_another_machine_is_refused(tmp_path):
    emit(tmp_path, "cutile", host=243)
    with pytest.raises(ValueError, match=r"host: got \w+; allowed ELF machine 243, whose code is in the cubin"):
        aot.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"MZ", b"\x7fELF\x02\x01", b"\x7fELF\x02\x01" + bytes(70)])
def test_what_is_no_cubin(content):
    with pytest.raises(ValueError, match=r"got .*(no 64-bit ELF file|cut off or damaged|allowed what the cubin has)"):
        cubin.read_entry(content, "entry")


def test_a_cubin_whose_sections_are_damaged(monkeypatch):
    broken = {".nv.info.entry": struct.pack("<BBHI", 4, 0x17, 4, 0), ".nv.host": bytes(19)}
    found = [cubin.Section(name=name, content=content, size=0, info=0) for name, content in broken.items()]
    monkeypatch.setattr(cubin, "read_sections", lambda code: found)
    with pytest.raises(ValueError, match="kernel: entry: what the cubin says of it is damaged"):
        cubin.read_entry(b"", "entry")
    with pytest.raises(ValueError, match="cubin: got host code of 19 bytes; allowed an ELF file"):
        cubin.host_of(b"")


def test_a_section_says_its_size_and_registers():
    (name, info) = cubin.read_sections(fake_cubin("entry", ()))
    assert (name.name, info.name, info.size, info.info) == (".shstrtab", ".nv.info.entry", len(info.content), 7 << 24)
