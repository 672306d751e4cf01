"""Emitted kernels with no compiler: ELF files that say what the loader reads, and folders of them."""

import json
import struct
from importlib import import_module

from multiattn import aot
from multiattn.cuda.instances import launches_of
from multiattn.plan import abi
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import Exported, get, make_plan
from multiattn.problem import Problem

BOX = abi.Box(extents=(1, 1, 64, 64), swizzle=3, dtype=9)
IMAGES = {"triton": abi.Image(threads=128, dynamic_smem_bytes=70000, boxes=(BOX, BOX)), "cutile": abi.Image(threads=1)}
VARIANTS = {"triton": "full"}
"""The variants that IMAGES are of; else the best."""
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
        place = names.index(name.encode()), 1, 0, 0, at + len(body), len(content), 0, 7 << 24
        headers += struct.pack("<IIQQQQII16x", *place)
        body += content
    front = b"\x7fELF\x02\x01".ljust(0x28, b"\0") + struct.pack("<Q", at + len(body))
    front = front.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, len(contents), 0)
    return front.ljust(64, b"\0") + body + headers


def problem(**sizes):
    return Problem.contiguous(**{"batch": 2, "heads_q": 4, "heads_kv": 2, "seq_q": 101, "head_dim": 64, **sizes})


def emit(folder, name, *, host=None, arch="sm90", variant=None, whole=None, **sizes):
    """A folder with one forward kernel whose code is fake, for `problem` of these sizes, or for the `whole` one."""
    variant = variant or VARIANTS.get(name)
    plan = make_plan(get(name), whole or problem(**sizes), ARCHS[arch], variant=variant, probe=False)
    module = import_module(f"multiattn.{name}.bind")
    binding = module.bind(plan, IMAGES[name] if name in IMAGES else launches_of(plan)[0].image())
    threads = max(128, binding.image.threads)
    kernel = Exported(
        kernel="entry",
        seconds=0.0,
        cubin=fake_cubin("entry", binding.arguments, threads=threads, host=host),
        threads=threads,
        dynamic_smem_bytes=binding.image.dynamic_smem_bytes,
        texts={"ptx": b"// ptx", "sass": b"EXIT"},
        remarks="--- !Passed" if name == "cutile" else "",
        binding=binding,
    )
    return plan, binding, aot.write(folder, plan, [kernel])


def loaded(folder, name, **options):
    """The kernel of such a folder."""
    emit(folder, name, **options)
    return aot.load(folder)


def edit(folder, change):
    """Change the only entry of a folder."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    (entry,) = content["kernels"]
    change(entry)
    path.write_text(json.dumps(content))
