"""The cache of compiled code: nothing damaged, foreign or outdated is loaded, and nothing is left behind."""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from multiattn.cuda import BACKEND, source, tools
from multiattn.cuda.cpu import host
from multiattn.cuda.instances import kernels_of
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import make_plan
from multiattn.problem import Problem
from multiattn.run import cache

needs_host = pytest.mark.skipif(bool(tools.probe_host()), reason="no g++ for the emulation")
needs_nvrtc = pytest.mark.skipif(bool(tools.probe_nvrtc()), reason="no NVRTC")
ADD = '#include "added.h"\nextern "C" int multiattn_add(int x) { return x + ADDED; }\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_whole(path):
    path.write_bytes(bytes(range(256)) * 64)


def entries(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".locks")


def test_an_entry_is_made_once_and_never_half(folder):
    made = []

    def make(path):
        made.append(path)
        write_whole(path)

    def fail(path):
        path.write_text("half")
        raise error

    for error in (RuntimeError("compiler died"), OSError("No space left on device")):  # the maker's own
        with pytest.raises(type(error), match=f"^{error}"):
            cache.fetch("key", ".x", fail)
        assert entries(folder) == []
    assert cache.fetch("key", ".x", make) == cache.fetch("key", ".x", make) == folder / "key.x"
    assert entries(folder) == ["key.x", "key.x.sha256"]
    assert len(made) == 1
    assert cache.key_of(["ab", "c"]) != cache.key_of(["a", "bc"])


@pytest.mark.parametrize("damage", ["empty", "half", "zeros", "zeroed middle", "another digest", "no text"])
@pytest.mark.parametrize("suffix", [".cubin", ".so"])
def test_a_damaged_entry_is_made_again_with_one_warning(damage, suffix, folder):
    entry = cache.fetch("key", suffix, write_whole)
    whole = entry.read_bytes()
    digest = folder / f"{entry.name}.sha256"
    size = len(whole)
    damaged = {"empty": b"", "half": whole[: size // 2], "zeros": bytes(size)}
    damaged["zeroed middle"] = whole[: size // 4] + bytes(size // 2) + whole[-(size // 4) :]
    if damage in damaged:
        entry.write_bytes(damaged[damage])
    else:
        digest.write_bytes(b"0" * 64 if damage == "another digest" else b"\xff" * 64)
    with pytest.warns(RuntimeWarning, match="is damaged and is compiled again") as warned:
        assert cache.fetch("key", suffix, write_whole).read_bytes() == whole
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.fetch("key", suffix, pytest.fail)


def test_an_entry_without_a_digest_was_not_finished(folder):
    entry = cache.fetch("key", ".x", write_whole)
    entry.with_name("key.x.sha256").unlink()
    entry.write_text("half")
    assert cache.fetch("key", ".x", write_whole).stat().st_size > 4


def test_an_entry_reaches_the_disk_before_it_has_its_name(folder, monkeypatch):
    done = []
    fsync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append(Path(new).name), rename(old, new)))
    cache.fetch("key", ".x", write_whole)
    assert [Path(it).name for it in done] == ["key.x.sha256", "key.x.sha256", "key.x", "key.x", folder.name]


def test_threads_make_one_entry_once(folder):
    made = []

    def make(path):
        made.append(path)
        time.sleep(0.2)
        write_whole(path)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: cache.fetch("key", ".x", make), range(4)))
    assert len(made) == 1


def test_processes_make_one_entry_once(folder):
    def make(path):
        os.write(writer, b"made")
        time.sleep(0.5)
        write_whole(path)

    reader, writer = os.pipe()
    children = [in_child(lambda: cache.fetch("key", ".x", make)) for _ in range(2)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert os.read(reader, 100) == b"made"
    os.close(reader)
    os.close(writer)


def in_child(work):
    """Do it in a forked process, which starts in no time; its exit status is 1 for an exception, 2 for an interrupt."""
    if child := os.fork():
        return child
    status = 1
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    signal.alarm(60)
    try:
        work()
        status = 0
    except KeyboardInterrupt:
        status = 2
    finally:
        os._exit(status)


def test_abandoned_drafts_are_swept_and_no_others(folder, monkeypatch):
    cache.fetch("first", ".x", write_whole)
    for name in (".making-old", ".making-new", ".making-foreign"):
        (folder / name).mkdir()
        (folder / name / "half").write_text("half")
    old = time.time() - 2 * cache._ABANDONED_S
    os.utime(folder / ".making-old", (old, old))
    cache.fetch("second", ".x", write_whole)
    assert [name for name in entries(folder) if name.startswith(".making-")] == [".making-foreign", ".making-new"]
    os.utime(folder / ".making-foreign", (old, old))
    with monkeypatch.context() as patched:
        patched.setattr(cache, "check_owner", lambda folder: None)
        patched.setattr(os, "geteuid", lambda: 12345)
        cache.fetch("third", ".x", write_whole)
    assert ".making-foreign" in entries(folder)


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777, 0o702])
def test_nothing_is_loaded_from_a_directory_that_others_can_write_to(mode, folder):
    cache.fetch("key", ".x", write_whole)
    folder.chmod(mode)
    for key in ("key", "other"):
        with pytest.raises(PermissionError, match=r"^MULTIATTN_CACHE_DIR: .* can be written to by other users"):
            cache.fetch(key, ".x", write_whole)


def test_nothing_is_loaded_from_a_directory_of_another_user(folder, monkeypatch):
    cache.fetch("key", ".x", write_whole)
    status = os.stat_result((0o40700, 1, 1, 1, 12345, 1, 0, 0, 0, 0))
    monkeypatch.setattr(Path, "stat", lambda path, **_: status)
    with pytest.raises(PermissionError, match=r"^MULTIATTN_CACHE_DIR: .* belongs to user 12345, .*; allowed"):
        cache.fetch("key", ".x", write_whole)


def test_the_directory_is_the_environments_and_private(folder, monkeypatch, tmp_path):
    before = os.umask(0o002)
    try:
        cache.fetch("key", ".x", write_whole)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv(cache.DIRECTORY_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.directory() == tmp_path / "multiattn"


def test_a_user_without_a_home_has_a_private_directory(tmp_path, monkeypatch):
    """No HOME, and no entry in the password database."""

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", cache.DIRECTORY_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = tmp_path / f"multiattn-{os.getuid()}"
    assert cache.fetch("key", ".x", write_whole) == found / "key.x"
    assert found.stat().st_mode & 0o777 == 0o700


@pytest.fixture
def header(tmp_path, monkeypatch):
    """A header that the emulation's builds find, for a test to change."""
    monkeypatch.setattr(host, "INCLUDES", (tmp_path, *host.INCLUDES))
    (tmp_path / "added.h").write_text("#define ADDED 1\n")
    return tmp_path / "added.h"


@needs_host
def test_a_key_of_a_host_build_covers_headers_flags_and_compiler(header, monkeypatch):
    def key(flag="-O1"):
        return host._build(ADD, (flag,), ".so")

    monkeypatch.setattr(cache, "fetch", lambda key, suffix, make: key)
    first = key()
    assert key() == first
    assert key("-O2") != first
    with monkeypatch.context() as patched:
        patched.setattr(host, "gxx_version", lambda: "99.1")
        assert key() != first
    header.write_text("#define ADDED 2\n")
    assert key() != first


@needs_host
def test_standard_headers_are_parsed_once_and_read_where_what_was_parsed_is_of_no_use(folder, monkeypatch):
    """With -H g++ tells of what was parsed before: a ! where it takes it, an x where not."""
    told = []

    def run(command, source, *, scratch):
        done = tools.run_compiler([*command, "-H"], source, scratch=scratch)
        told.append(done.stderr)
        return done

    monkeypatch.setattr(host, "run_compiler", run)
    monkeypatch.setattr(host, "RUNTIME", ())
    for number in range(2):
        host.build_source(f"std::initializer_list<int> number_{number};")
    (parsed,) = folder.glob("*.h.gch")
    assert len(told) == 3
    assert all(f"! {parsed}\n" in it for it in told[1:])
    parsed.write_bytes(b"of another compiler")
    host.build_source("std::initializer_list<int> number_2;")
    assert f"x {parsed}\n" in told[3]  # and yet it knew the type
    for path in (parsed, parsed.with_suffix("")):
        path.unlink()
    host.build_source("std::initializer_list<int> number_3;")
    assert f"! {parsed}\n" in told[5]  # after it was made again


@needs_nvrtc
def test_a_key_of_nvrtc_covers_headers_arch_and_compiler(folder, tmp_path, monkeypatch):
    from multiattn.cuda import compile as nvrtc

    problem = Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=64)
    (kernel,) = kernels_of(make_plan(BACKEND, problem, ARCHS["sm80"], probe=False))
    monkeypatch.setattr(nvrtc, "_compile", lambda source, target: target.encode())
    shutil.copytree(source.ROOT / "include", tmp_path / "include")
    monkeypatch.setattr(nvrtc, "DEVICE_INCLUDES", (tmp_path / "include", source.ROOT / "kernels"))
    first = nvrtc.cubin_path(kernel, ARCHS["sm80"])
    assert nvrtc.cubin_path(kernel, ARCHS["sm80"]) == first
    found = {first, nvrtc.cubin_path(kernel, ARCHS["sm90"])}
    found.add(nvrtc.cubin_path(replace(kernel, arch_features=True), ARCHS["sm80"]))
    with monkeypatch.context() as patched:
        patched.setattr(nvrtc, "_compiler_version", lambda: "nvrtc 99")
        found.add(nvrtc.cubin_path(kernel, ARCHS["sm80"]))
    with (tmp_path / "include" / "multiattn" / "mask.cuh").open("a") as header:
        header.write("// changed\n")
    found.add(nvrtc.cubin_path(kernel, ARCHS["sm80"]))
    assert len(found) == 5


@needs_host
def test_an_interrupt_leaves_no_compiler_and_no_file(folder, tmp_path, monkeypatch):
    """SIGINT while cc1plus, a child of g++, works."""
    limits = ("-fconstexpr-loop-limit=2147483647", "-fconstexpr-ops-limit=9223372036854775807")
    monkeypatch.setattr(host, "RUNTIME", ())
    monkeypatch.setattr(host, "_parsed_headers", lambda flags, directory: os.devnull)
    monkeypatch.setattr(host, "_KERNEL_FLAGS", (*host._KERNEL_FLAGS, *limits))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code = (
        "constexpr long f(long n) { long s = 0; for (long i = 0; i < n; ++i) s += i; return s; }"
        f"static_assert(f(1L << 40) != 0); // {os.getpid()}"
    )
    child = in_child(lambda: host.build_source(code))
    try:
        wait_for(lambda: compilers(folder), 60)
        os.kill(child, signal.SIGINT)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        wait_for(lambda: not compilers(folder), 5)
    finally:
        for compiler in compilers(folder):
            os.kill(compiler, signal.SIGKILL)
    assert entries(folder) == []
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def compilers(folder):
    """Processes of the compiler proper that write below `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes()
            if b"cc1plus" in command and str(folder).encode() in command:
                found.append(int(path.parent.name))
    return found


def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


FORK = """
import os, signal, sys, threading, time
import torch, multiattn
q = torch.zeros(1, 1, 8, 16, dtype=torch.float16)
long = torch.zeros(1, 2, 512, 16, dtype=torch.float16)
for backend in ("triton", "cuda"):
    multiattn.fmha(q, q, q, backend=backend)
    busy = threading.Thread(target=lambda: [multiattn.fmha(long, long, long, backend=backend) for _ in range(3)])
    busy.start()
    time.sleep(0.1)
    assert busy.is_alive(), backend
    if not (child := os.fork()):
        signal.alarm(60)
        out = multiattn.fmha(q, q, q, backend=backend)
        os._exit(0 if out.abs().max() == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, backend
    busy.join()
"""


@needs_host
def test_a_child_forked_while_a_thread_is_in_a_kernel_can_call():
    pytest.importorskip("triton")
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], timeout=200, check=True)
