"""Kernels ahead of time: manifest and loader, against a driver that only remembers; no compiler, no GPU."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import multiattn
from multiattn import abi, aot, manifest
from multiattn.arch import ARCHS
from multiattn.backend import BACKENDS, Exported, get, make_plan
from multiattn.problem import Problem

BOX = abi.Box(extents=(1, 1, 64, 64), swizzle=3, dtype=9)
IMAGES = {
    "triton": abi.Image(threads=128, dynamic_smem_bytes=70000, boxes=(BOX, BOX)),
    "cutile": abi.Image(threads=1),
}
BASE = 0x210  # of parameters in the constant bank, as on sm90


def fake_cubin(symbol, arguments, threads=128, host=None):
    """A 64-bit ELF file that says of a kernel what `abi.read_entry` reads."""
    info, end = b"", BASE
    for ordinal, argument in enumerate(arguments):
        start = -(-end // abi.alignment_of(argument)) * abi.alignment_of(argument)
        info += struct.pack("<BBHIHHI", 4, 0x17, 12, 0, ordinal, start - BASE, abi.size_of(argument) << 18)
        end = start + abi.size_of(argument)
    info += struct.pack("<BBHIHH", 4, 0x0A, 8, 0, BASE, end - BASE) + struct.pack("<BBHIII", 4, 0x10, 12, threads, 1, 1)
    contents = {".shstrtab": b"", f".nv.info.{symbol}": info}
    if host is not None:
        contents[".nv.host"] = struct.pack("<18xH", host)
    names = b"\0".join(name.encode() for name in contents) + b"\0"
    contents[".shstrtab"] = names
    body, headers, at = b"", b"", 64
    for name, content in contents.items():
        headers += struct.pack("<IIQQQQ24x", names.index(name.encode()), 1, 0, 0, at + len(body), len(content))
        body += content
    front = b"\x7fELF\x02\x01".ljust(0x28, b"\0") + struct.pack("<Q", at + len(body))
    front = front.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, len(contents), 0)
    return front.ljust(64, b"\0") + body + headers


def problem(**sizes):
    return Problem.contiguous(**{"batch": 2, "heads_q": 4, "heads_kv": 2, "seq_q": 101, "head_dim": 64, **sizes})


def emit(folder, name, *, host=None, arch="sm90", **sizes):
    """A folder with one forward kernel whose code is fake."""
    plan = make_plan(get(name), problem(**sizes), ARCHS[arch], probe=False)
    module = import_module(f"multiattn.{name}.bind")
    binding = module.bind(plan, IMAGES[name] if name in IMAGES else module.image_of(plan))
    kernel = Exported(
        kernel="entry",
        seconds=0.0,
        cubin=fake_cubin("entry", binding.arguments, host=host),
        threads=128,
        dynamic_smem_bytes=binding.image.dynamic_smem_bytes,
        texts={"ptx": b"// ptx"},
        remarks="--- !Passed" if name == "cutile" else "",
        binding=binding,
    )
    return plan, binding, aot.write(folder, plan, [kernel], versions={name: "1.2"}, texts={"entry": {"sass": b"EXIT"}})


def edit(folder, change, *, seal=manifest.seal):
    """Change the only entry of a folder, as one would who knows of its digest."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    (entry,) = content["kernels"]
    change(entry)
    content["kernels"] = [seal(entry)]
    path.write_text(json.dumps(content))


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
        assert kernel._bind(plan.problem) == binding
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
    assert results[0].stdout.strip() == str(copied / "aot.py"), results[0].stderr
    assert "emit it again" in results[1].stderr


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("cuda", {"axes", "backward_configs", "bind", "configs", "launches", "params", "rules", "source", "variants"}),
        ("triton", {"bind", "configs", "steps"}),
        ("cutile", {"bind", "configs", "steps"}),
    ],
)
def test_host_code_is_what_makes_a_binding(name, modules, monkeypatch):
    read = []
    text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, **options: read.append(path) or text(path, **options))
    assert manifest.host_digest.__wrapped__(name) == manifest.host_digest(name)
    assert {path.relative_to(manifest._ROOT).as_posix() for path in read} == {
        *(f"{name}/{module}.py" for module in modules),
        *("abi.py", "problem.py"),
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
import test_aot
folder, first = pathlib.Path(sys.argv[2]), int(sys.argv[3])
(folder / f"ready{first}").touch()
while not (folder / "go").exists():
    time.sleep(0.001)
test_aot.write_backward(folder, range(first, first + 20))
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


# ---------------------------------------------------------------- what code holds for


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "sizes",
    [
        {"seq_q": 7, "seq_kv": 4096},
        {"batch": 5, "heads_q": 32, "heads_kv": 4},
        {"scale": 0.5},
        {"heads_q": 4, "heads_kv": 4},
        {"seq_q": 1, "seq_kv": 1},
    ],
)
def test_one_kernel_runs_many_problems(name, sizes, tmp_path):
    emit(tmp_path, name, batch=3)
    kernel = aot.load(tmp_path)
    other = problem(**sizes)
    binding = kernel._bind(other)
    assert binding.constants == kernel.entry["launch"]["constants"]
    tiles = math.ceil(other.seq_q / kernel.plan.config.tile_m)
    assert math.prod(binding.grid) == tiles * other.batch * other.heads_q


@pytest.mark.parametrize(
    ("name", "emitted", "sizes", "message"),
    [
        ("triton", {"seq_q": 128}, {"seq_q": 101}, "q_head: got i32; allowed i32 multiple of 16"),
        ("triton", {"heads_kv": 4}, {}, "group: got i32; allowed the constant 1"),
        ("triton", {}, {"scale": -1.0}, "scale_sign: got -1; allowed 1"),
        ("cutile", {}, {"scale": 0.0}, "scale_sign: got 0; allowed 1"),
        ("cutile", {"seq_q": 128}, {"seq_q": 101}, "q_seq: got any; allowed multiple of 16"),
        ("cutile", {"seq_kv": 128}, {"seq_kv": 101}, "masked: got True; allowed False"),
        ("cuda", {}, {"dtype": "fp16"}, "dtype: got fp16; allowed bf16"),
        ("cuda", {}, {"head_dim": 72}, "head_dim: got 72; allowed 64"),
        ("cuda", {"causal": True}, {}, "causal: got False; allowed True"),
    ],
)
def test_code_is_refused_what_it_does_not_hold_for(name, emitted, sizes, message, tmp_path):
    emit(tmp_path, name, **emitted)
    kernel = aot.load(tmp_path)
    with pytest.raises(ValueError, match=f"{kernel.name} cannot run these tensors: .*{message}"):
        kernel._bind(problem(**sizes))


@pytest.mark.parametrize("name", BACKENDS)
def test_code_that_assumes_little_runs_what_is_better_aligned(name, tmp_path):
    variant = {"triton": "pointer_full"}.get(name)
    worse = replace(problem(), alignment=2)
    plan = make_plan(get(name), worse, ARCHS["sm90"], variant=variant, probe=False)
    module = import_module(f"multiattn.{name}.bind")
    image = abi.Image(threads=128)
    emitted = module.bind(plan, image)
    better = module.bind(replace(plan, problem=problem()), image, emitted.constants)
    assert better.constants == emitted.constants
    assert list(map(abi.size_of, better.arguments)) == list(map(abi.size_of, emitted.arguments))
    aligned = module.bind(replace(plan, problem=problem()), image)
    assert module.bind(plan, image, aligned.constants).constants != aligned.constants


def test_strides_beyond_31_bits_need_code_for_them():
    from multiattn.cutile.bind import IMAGE, bind

    plan = make_plan(get("cutile"), problem(), ARCHS["sm90"], probe=False)
    long = replace(plan, problem=replace(problem(), strides_q=(2**33, 64 * 101, 64)))
    wide = bind(long, IMAGE)
    assert wide.constants["int64"] == "True"
    assert {number.kind for number in wide.arguments[1:9]} == {"i64"}
    assert bind(plan, IMAGE, wide.constants).constants["int64"] == "True"
    assert bind(long, IMAGE, bind(plan, IMAGE).constants).constants["int64"] == "True"


# ---------------------------------------------------------------- bytes


def test_arguments_become_bytes():
    addresses = {"q": 0x1122334455667788, "k": 16}
    pack = abi.pack

    def encode(tensor_map, address):
        return bytes([tensor_map.box.swizzle, address]) * 64

    assert pack(abi.Pointer(tensor="q"), addresses, encode) == struct.pack("<Q", 0x1122334455667788)
    assert pack(abi.Pointer(tensor=None), addresses, encode) == bytes(8)
    numbers = [("i8", 3, "<b"), ("i32", -7, "<i"), ("i64", 2**40, "<q"), ("f32", 0.25, "<f")]
    for kind, value, form in numbers:
        assert pack(abi.Number(kind=kind, value=value), addresses, encode) == struct.pack(form, value)
    data = pack(abi.Struct(data=bytes(range(24)), pointers={8: "q"}), addresses, encode)
    assert data == bytes(range(8)) + struct.pack("<Q", addresses["q"]) + bytes(range(16, 24))
    tensor_map = abi.TensorMap(tensor="k", shape=(1,), strides=(), box=BOX)
    assert pack(tensor_map, addresses, encode) == bytes([3, 16]) * 64


def test_the_struct_is_that_of_a_launch():
    from multiattn.cuda.bind import bind, image_of
    from multiattn.cuda.params import make_params, set_pointers

    plan = make_plan(get("cuda"), problem(), ARCHS["sm90"], probe=False)
    tensors = [torch.empty(2, dtype=torch.float32) for _ in range(5)]
    params = make_params(plan.problem, plan.config)
    set_pointers(params, *tensors)
    addresses = dict(zip(("q", "k", "v", "out", "lse"), (tensor.data_ptr() for tensor in tensors), strict=True))
    (argument,) = bind(plan, image_of(plan)).arguments
    assert abi.pack(argument, addresses, aot.encode_tensor_map) == bytes(params)


def test_a_tensor_map_is_encoded_innermost_first_at_64_bytes(monkeypatch):
    seen = []

    def encode(place, dtype, rank, address, shape, strides, box, steps, *rest):
        assert place.value % 64 == 0
        ctypes.memset(place, 0xAB, 128)
        seen.append((dtype, rank, address.value, list(shape), list(strides), list(box), list(steps), rest))
        return 0

    monkeypatch.setattr(aot.context, "_load_driver", lambda: SimpleNamespace(cuTensorMapEncodeTiled=encode))
    tensor_map = abi.TensorMap(tensor="k", shape=(2, 3, 4, 64), strides=(1536, 512, 128), box=BOX)
    assert aot.encode_tensor_map(tensor_map, 4096) == b"\xab" * 128
    assert seen == [(9, 4, 4096, [64, 4, 3, 2], [128, 512, 1536], [64, 64, 1, 1], [1] * 4, (0, 3, 2, 0))]
    failing = SimpleNamespace(cuTensorMapEncodeTiled=lambda *arguments: 1)
    monkeypatch.setattr(aot.context, "_load_driver", lambda: failing)
    with pytest.raises(RuntimeError, match="cuTensorMapEncodeTiled: CUresult 1"):
        aot.encode_tensor_map(tensor_map, 4096)


# ---------------------------------------------------------------- launching


class FakeDriver:
    """Just what aot.py calls; `launched` holds (arguments, kernel's parameters) of each cuLaunchKernel."""

    CUresult = SimpleNamespace(CUDA_SUCCESS="ok")
    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="smem",
        CU_FUNC_ATTRIBUTE_NUM_REGS=100,
        CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES=101,
        CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES=102,
        CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK=103,
        CU_FUNC_ATTRIBUTE_BINARY_VERSION=104,
    )

    def __init__(self):
        self.sizes, self.launched, self.allowed, self.loaded, self.status = [], [], [], 0, "ok"
        self.unloaded = []

    def CUfunction(self, kernel):  # noqa: N802
        return ("function", kernel)

    def cuLaunchKernel(self, function, gx, gy, gz, bx, by, bz, smem, stream, params, extra):  # noqa: N802
        places = ctypes.cast(params, ctypes.POINTER(ctypes.c_void_p))
        values = [ctypes.string_at(places[index], size) for index, size in enumerate(self.sizes)]
        self.launched.append(((function, (gx, gy, gz), (bx, by, bz), smem, stream, extra), values))
        return (self.status,)

    def cuLibraryLoadData(self, *arguments):  # noqa: N802
        assert arguments[1:] == ([], [], 0, [], [], 0)
        self.loaded += 1
        time.sleep(0.02)
        return "ok", "library"

    def cuLibraryUnload(self, library):  # noqa: N802
        self.unloaded.append(library)
        return (self.status,)

    def cuLibraryGetKernel(self, library, name):  # noqa: N802
        assert (library, name) == ("library", b"entry")
        return "ok", 7

    def cuKernelGetFunction(self, kernel):  # noqa: N802
        return "ok", ("function", kernel)

    def cuDeviceGet(self, index):  # noqa: N802
        return "ok", f"device {index}"

    def cuKernelSetAttribute(self, attribute, value, kernel, device):  # noqa: N802
        self.allowed.append((attribute, value, kernel, device))
        return ("ok",)

    def cuFuncSetAttribute(self, function, attribute, value):  # noqa: N802
        self.allowed.append((attribute, value, function))
        return ("ok",)

    def cuFuncGetAttribute(self, attribute, function):  # noqa: N802
        return "ok", attribute + function[1]

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function, threads, smem):  # noqa: N802
        return "ok", threads // 32

    def cuGetErrorString(self, status):  # noqa: N802
        return "ok", b"in words"


@pytest.fixture
def driver(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setattr(aot, "_driver", lambda: fake)
    monkeypatch.setattr(aot, "detect", lambda device: ARCHS["sm90"])
    monkeypatch.setattr(aot, "encode_tensor_map", lambda tensor_map, address: struct.pack("<QQ", address, 1) * 8)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 70 + device, raising=False)
    return fake


def tensors(*, seq_q=101, seq_kv=130, heads_q=4, batch=2, head_dim=64, dtype=torch.bfloat16):
    q = torch.zeros(batch, seq_q, heads_q, head_dim, dtype=dtype).transpose(1, 2)
    k = torch.zeros(batch, seq_kv, 2, head_dim, dtype=dtype).transpose(1, 2)
    return q, k, k.clone()


@pytest.mark.parametrize("name", BACKENDS)
def test_a_launch_is_what_the_binding_says(name, driver, tmp_path):
    emit(tmp_path, name)
    kernel = aot.load(tmp_path)
    q, k, v = tensors()
    binding = kernel._bind(Problem.of(q, k, v))
    driver.sizes = [abi.size_of(argument) for argument in binding.arguments]
    out, lse = kernel(q, k, v)
    ((function, grid, block, smem, stream, extra), values), = driver.launched  # fmt: skip
    image = binding.image
    assert (function, grid, block) == (("function", 7), binding.grid, (image.threads, 1, 1))
    assert (smem, stream, extra) == (image.dynamic_smem_bytes, 70, 0)
    named = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    addresses = {name: tensor.data_ptr() for name, tensor in named.items()}
    assert values == [abi.pack(argument, addresses, aot.encode_tensor_map) for argument in binding.arguments]
    assert driver.allowed == ([("smem", smem, 7, "device 0")] if smem else [])
    assert out.stride() == q.stride()
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((2, 4, 101), torch.float32, True)
    again = kernel(q, k, v, scale=0.5, out=out, lse=lse)
    assert again[0] is out
    assert again[1] is lse
    assert (driver.loaded, len(driver.launched)) == (1, 2)


def test_no_queries_and_no_keys_launch_nothing(driver, tmp_path):
    emit(tmp_path, "cuda")
    kernel = aot.load(tmp_path)
    out, lse = kernel(*tensors(seq_q=0))
    assert (out.shape, lse.shape) == ((2, 4, 0, 64), (2, 4, 0))
    out, lse = kernel(*tensors(seq_kv=0))
    assert out.eq(0).all()
    assert lse.eq(-math.inf).all()
    assert driver.launched == []


def test_tensors_that_the_kernel_is_not_for(driver, tmp_path, monkeypatch):
    emit(tmp_path, "triton")
    kernel = aot.load(tmp_path)
    refused = "cannot run these tensors: "
    with pytest.raises(ValueError, match=f"{refused}dtype: got fp16; allowed bf16; head_dim: got 72; allowed 64"):
        kernel(*tensors(dtype=torch.float16, head_dim=72))
    q, k, v = tensors()
    with pytest.raises(ValueError, match=f"{refused}strides: got a broadcast dimension"):
        kernel(q, k[:, :1].expand_as(k), v)
    with pytest.raises(ValueError, match="k and v must have one shape"):
        kernel(q, k, v[:, :, 1:])
    with pytest.raises(ValueError, match=r"gradients: got tensors that require them; allowed a call in torch.no_grad"):
        kernel(q.detach().requires_grad_(), k, v)
    monkeypatch.setattr(aot, "detect", lambda device: ARCHS["sm100"])
    with pytest.raises(ValueError, match=f"{refused}arch: got sm100; allowed sm90"):
        kernel(q, k, v)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=f"{refused}arch: got cpu; allowed sm90"):
        kernel(q, k, v)
    assert driver.launched == []


def test_results_that_no_kernel_can_write(driver, tmp_path):
    emit(tmp_path, "cuda")
    kernel = aot.load(tmp_path)
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"out: got strides .*; allowed strides \(25856, 64, 256, 1\)"):
        kernel(q, k, v, out=q.contiguous())
    with pytest.raises(ValueError, match=r"lse: got \(2, 4, 100\), torch.float32 on cpu; allowed \(2, 4, 101\)"):
        kernel(q, k, v, lse=torch.empty(2, 4, 100))
    with pytest.raises(TypeError, match=r"lse must be a torch.Tensor; got list"):
        kernel(q, k, v, lse=[])
    assert driver.launched == []


def test_a_failing_launch_says_what_the_driver_says(driver, tmp_path):
    emit(tmp_path, "cuda")
    driver.status = SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE")
    with pytest.raises(RuntimeError, match="cuLaunchKernel: CUDA_ERROR_INVALID_VALUE: in words"):
        aot.load(tmp_path)(*tensors())


def test_two_threads_load_once(driver, tmp_path):
    emit(tmp_path, "cuda")
    kernel = aot.load(tmp_path)
    start, found = threading.Barrier(4), []
    threads = [threading.Thread(target=lambda: (start.wait(), found.append(kernel._loaded(0)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [("function", 7)] * 4
    assert driver.loaded == 1


def test_code_outlives_its_kernel(driver, tmp_path):
    """A launch may still be under way, and a graph may have it."""
    emit(tmp_path, "cuda")
    aot.load(tmp_path)(*tensors())
    gc.collect()
    assert driver.unloaded == []


def test_a_library_without_the_kernel_is_unloaded(driver, monkeypatch):
    driver.cuLibraryGetKernel = lambda library, name: (SimpleNamespace(name="CUDA_ERROR_NOT_FOUND"), None)
    with pytest.raises(RuntimeError, match="cuLibraryGetKernel: CUDA_ERROR_NOT_FOUND"):
        aot._load(b"cubin", "entry")
    assert driver.unloaded == ["library"]


def test_the_context_is_asked_for_on_the_tensors_own_device(monkeypatch):
    seen = []

    @contextlib.contextmanager
    def guard(device):
        seen.append(f"enter {device.index}")
        yield
        seen.append("exit")

    monkeypatch.setattr(torch.cuda, "device", guard)
    monkeypatch.setattr(aot.context, "ensure_context", lambda index: seen.append(f"context {index}"))
    with aot._on(torch.device("cuda", 1)):
        seen.append("body")
    assert seen == ["enter 1", "context 1", "body", "exit"]
    with aot._on(torch.device("cpu")):
        assert len(seen) == 4


def test_what_the_driver_says_of_a_kernel(driver, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(aot.context, "make_context_current", lambda device: None)
    assert aot.attributes(b"cubin", "entry", threads=128, dynamic_smem_bytes=60000) == {
        "registers": 107,
        "static_smem_bytes": 108,
        "local_bytes": 109,
        "max_threads": 110,
        "binary_version": 111,
        "blocks_per_sm": 4,
    }
    assert driver.allowed == [("smem", 60000, ("function", 7))]
    assert "blocks_per_sm" not in aot.attributes(b"cubin", "entry")
    assert driver.unloaded == ["library"] * driver.loaded


def test_the_loader_imports_no_language(tmp_path):
    for name in BACKENDS:
        emit(tmp_path, name)
    code = (
        "import sys\n"
        "for name in ('triton', 'cuda', 'nvidia'): sys.modules[name] = None\n"
        "import json, pathlib\n"
        "from multiattn import aot\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "names = [entry['name'] for entry in json.loads((folder / 'manifest.json').read_text())['kernels']]\n"
        "print(*(aot.load(folder, name=name).plan.backend for name in names))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert done.stdout.split() == list(BACKENDS), done.stderr
