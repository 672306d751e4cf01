"""What the compiler makes of each verb of ptx.cuh: a tiny kernel per verb, by NVRTC, its SASS without its frame.

Needs no GPU; it needs NVRTC and cuobjdump.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from bench.errors import InputError
from multiattn.cuda.source import DEVICE_INCLUDES
from multiattn.cuda.tools import probe_nvrtc
from multiattn.targets.sass import parse
from multiattn.toolchain import disassemble, find_cuobjdump, version_of

ARCHS = ("sm80", "sm90", "sm100", "sm120")
"""One of each generation that has a column."""

_VECTOR_RED_ARCH = 90  # the first with red.v4


@dataclass(frozen=True, kw_only=True, slots=True)
class Verb:
    """A verb, or an idiom made of plain C++, and how to call it."""

    name: str
    """As in ptx.cuh; a template's argument follows in brackets, an overload's type in parentheses."""
    ptx: str
    """What must stand in the PTX that NVRTC makes of it."""
    body: str
    """C++ of a kernel: `in` is 16 uint32 of the lane's own, `out` a pointer to uint32, `smem` a shared address."""
    oldest: int = 80

    @property
    def function(self) -> str:
        """The name without its template's argument or its type."""
        return re.split(r"[<(]", self.name)[0]


def _matrix(verb: str) -> str:
    return f"uint32 m[4]; {verb}(m, smem); for (int i = 0; i < 4; ++i) out[i] = m[i];"


def _multiply(element: str) -> str:
    return (
        "float d[4]; uint32 a[4]; for (int i = 0; i < 4; ++i) { a[i] = in[i]; d[i] = __uint_as_float(in[4 + i]); } "
        f"mma_m16n8k16<{element}>(d, a, in[8], in[9]); "
        "for (int i = 0; i < 4; ++i) out[i] = float_bits(d[i]);"
    )


_MULTIPLY_FP16 = (
    "uint32 a[4]; for (int i = 0; i < 4; ++i) a[i] = in[i]; uint32 d[2] = {in[4], in[5]}; "
    "mma_m16n8k16_fp16(d, a, in[8], in[9]); out[0] = d[0]; out[1] = d[1];"
)


def _unpack(verb: str) -> str:
    return f"const uint32 pair = in[0]; out[1] = pair; out[0] = float_bits({verb}(pair));"


_VALUE = "__uint_as_float(in[0])"
_PAIR = f"{_VALUE}, __uint_as_float(in[1])"

VERBS: tuple[Verb, ...] = (
    Verb(name="ldmatrix_x4", ptx="ldmatrix.sync.aligned.m8n8.x4.shared.b16", body=_matrix("ldmatrix_x4")),
    Verb(
        name="ldmatrix_x4_trans",
        ptx="ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16",
        body=_matrix("ldmatrix_x4_trans"),
    ),
    Verb(name="mma_m16n8k16<fp16>", ptx="mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", body=_multiply("fp16")),
    Verb(name="mma_m16n8k16<bf16>", ptx="mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", body=_multiply("bf16")),
    Verb(name="mma_m16n8k16_fp16", ptx="mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16", body=_MULTIPLY_FP16),
    Verb(name="cp_async_16", ptx="cp.async.cg.shared.global.L2::128B", body="cp_async_16(smem, in, true);"),
    Verb(name="cp_async_4", ptx="cp.async.ca.shared.global", body="cp_async_4(smem, in, true);"),
    Verb(name="cp_async_commit", ptx="cp.async.commit_group", body="cp_async_commit();"),
    Verb(name="cp_async_wait<1>", ptx="cp.async.wait_group 1", body="cp_async_wait<1>();"),
    Verb(
        name="load_shared_16",
        ptx="ld.shared.v4.b32",
        body="Chunk c = load_shared_16(smem); for (int i = 0; i < 4; ++i) out[2 * i] = c.word[i];",
    ),
    Verb(
        name="load_shared_8",
        ptx="ld.shared.v2.f32",
        body="float v[2]; load_shared_8(v, smem); out[0] = float_bits(v[0]); out[1] = float_bits(v[1]);",
    ),
    Verb(name="load_shared_4", ptx="ld.shared.f32", body="out[0] = float_bits(load_shared_4(smem));"),
    Verb(
        name="store_shared_16",
        ptx="st.shared.v4.b32",
        body="store_shared_16(smem, Chunk{{in[0], in[1], in[2], in[3]}});",
    ),
    Verb(name="store_shared_4", ptx="st.shared.b32", body="store_shared_4(smem, in[0]);"),
    Verb(
        name="load_global_16",
        ptx="ld.global",
        body="Chunk c = load_global_16(in); for (int i = 0; i < 4; ++i) out[2 * i] = c.word[i];",
    ),
    Verb(
        name="store_global_16",
        ptx="st.global.v4",
        body="store_global_16(out, Chunk{{in[0], in[2], in[4], in[6]}});",
    ),
    Verb(name="add_global_4", ptx="red.global.add.f32", body=f"add_global_4(reinterpret_cast<float*>(out), {_VALUE});"),
    Verb(
        name="add_global_16",
        ptx="red.global.add.v4.f32",
        body="float v[4]; for (int i = 0; i < 4; ++i) v[i] = __uint_as_float(in[i]); "
        "add_global_16(reinterpret_cast<float*>(out), v);",
        oldest=_VECTOR_RED_ARCH,
    ),
    Verb(name="exp2_approx", ptx="ex2.approx.ftz.f32", body=f"out[0] = float_bits(exp2_approx({_VALUE}));"),
    Verb(name="pack<fp16>", ptx="cvt.rn.f16x2.f32", body=f"out[0] = pack<fp16>({_PAIR});"),
    Verb(name="pack<bf16>", ptx="cvt.rn.bf16x2.f32", body=f"out[0] = pack<bf16>({_PAIR});"),
    Verb(name="unpack_low<fp16>", ptx="cvt.f32.f16", body=_unpack("unpack_low<fp16>")),
    Verb(name="unpack_high<fp16>", ptx="cvt.f32.f16", body=_unpack("unpack_high<fp16>")),
    Verb(name="unpack_low<bf16>", ptx="shl.b32", body=_unpack("unpack_low<bf16>")),
    Verb(name="unpack_high<bf16>", ptx="and.b32", body=_unpack("unpack_high<bf16>")),
    Verb(name="sign flip of two halves", ptx="xor.b32", body="out[0] = in[0] ^ 0x80008000u;"),
    Verb(
        name="shuffle_xor(float)",
        ptx="shfl.sync.bfly.b32",
        body=f"out[0] = float_bits(shuffle_xor({_VALUE}, 2));",
    ),
    Verb(name="shuffle_xor(uint32)", ptx="shfl.sync.bfly.b32", body="out[0] = shuffle_xor(in[0], 2);"),
    Verb(name="any_in_warp", ptx="vote.sync.any.pred", body="out[0] = any_in_warp(in[0] != 0);"),
    Verb(name="any_in_block", ptx="bar.red.or.pred", body="out[0] = any_in_block(in[0] != 0);"),
    Verb(name="sync_block", ptx="bar.sync", body="out[0] = in[0]; sync_block(); out[1] = in[1];"),
    Verb(name="sync_warp", ptx="bar.warp.sync", body="out[0] = in[0]; sync_warp(); out[1] = in[1];"),
)

WITHOUT_ROW: Mapping[str, str] = {
    "thread_index": "a special register",
    "block_index": "a special register",
    "recomputed": "no instruction: it hides a value from the compiler",
    "shared_base": "no instruction: a constant",
    "infinity": "no instruction: a constant",
    "float_bits": "no instruction: the same register",
    "log2_exact": "CUDA's log2f, about thirty instructions, once a row",
    "load_global_2": "plain C++",
    "load_global_4": "plain C++",
    "store_global_4": "plain C++",
}
"""Verbs that no table row is for, and why."""

_FRAME = re.compile(
    r"U?LDCU?(\.\w+)*|U?MOV(\.\w+)*|IMAD\.MOV(\.\w+)*|CS2R|S2U?R|HFMA2(\.MMA)?|LDG\.E(\.CONSTANT)?|STG\.E|"
    r"IMAD\.WIDE(\.\w+)*|LEA(\.\w+)*|ISETP(\.\w+)+|SEL|UIADD3|IADD3|NOP|BRA|EXIT"
)
"""What a kernel needs to get its arguments in and its result out: no verb is made of these."""
_NEVER = re.compile(r"^.*@!U?PT .*$", re.MULTILINE)
"""Instructions whose predicate is false for good; sm90 and later have three loads before the first LDGSTS."""
_FUNCTION = re.compile(r"^\s*Function : verb_(\d+)\s*$", re.MULTILINE)
_ENTRY = re.compile(r"\.entry verb_(\d+)\(")
_DECLARED = re.compile(r"^DEVICE [\w ]+? (\w+)\(", re.MULTILINE)


def why_not() -> str | None:
    """What is missing to compile and to disassemble, or None."""
    lacking = [str(reason) for reason in probe_nvrtc()]
    if find_cuobjdump() is None:
        lacking.append("no cuobjdump: pip install nvidia-cuda-cuobjdump")
    return "; ".join(lacking) or None


def compilers() -> str:
    """The versions that a table is of."""
    return f"NVRTC {version_of('nvidia-cuda-nvrtc')}, cuobjdump {version_of('nvidia-cuda-cuobjdump')}"


def declared_verbs() -> set[str]:
    """Every function of ptx.cuh."""
    return set(_DECLARED.findall((DEVICE_INCLUDES[0] / "multiattn" / "ptx.cuh").read_text()))


@functools.cache
def instructions(arch: str) -> Mapping[str, tuple[str, ...]]:
    """Per verb that the arch has, the SASS that it becomes, in order of its first appearance, each once."""
    sass = disassemble(_compile(arch).cubin) or ""
    _, *parts = _FUNCTION.split(_NEVER.sub("", sass))
    found: dict[str, tuple[str, ...]] = {}
    for index, text in zip(parts[::2], parts[1::2], strict=True):
        names = dict.fromkeys(it.name for it in parse(text) if not _FRAME.fullmatch(it.name))
        found[VERBS[int(index)].name] = tuple(names)
    return MappingProxyType(found)


def check_ptx(arch: str = ARCHS[-1]) -> list[str]:
    """Verbs whose PTX is not what `Verb.ptx` says."""
    _, *parts = _ENTRY.split(_compile(arch).ptx)
    text_of = dict(zip(map(int, parts[::2]), parts[1::2], strict=True))
    return [
        f"{verb.name}: {verb.ptx} is not in its PTX"
        for index, verb in enumerate(VERBS)
        if index in text_of and verb.ptx not in text_of[index]
    ]


def table(found: Mapping[str, Mapping[str, Sequence[str]]]) -> str:
    """Markdown: a line per verb; archs that give the same share an entry."""
    lines = ["| verb | PTX | SASS |", "|---|---|---|"]
    for verb in VERBS:
        archs_of: dict[str, list[str]] = {}
        for arch in found:
            names = found[arch].get(verb.name)
            text = "not there" if names is None else " ".join(f"`{name}`" for name in names) or "nothing"
            archs_of.setdefault(text, []).append(arch)
        cells = [
            text if len(archs) == len(found) else f"{', '.join(archs)}: {text}" for text, archs in archs_of.items()
        ]
        lines.append(f"| {verb.name} | `{verb.ptx}` | {'; '.join(cells)} |")
    return "\n".join(lines)


def all_instructions(archs: Iterable[str] = ARCHS) -> dict[str, Mapping[str, tuple[str, ...]]]:
    """`instructions` of each arch; InputError where the PTX is not what the table would say."""
    if problems := check_ptx():
        raise InputError("; ".join(problems))
    return {arch: instructions(arch) for arch in archs}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Compiled:
    cubin: bytes
    ptx: str


@functools.cache
def _compile(arch: str) -> _Compiled:
    """All verbs that an arch has, by NVRTC itself: cuda.core asks the driver before it gives PTX, and there is none."""
    from cuda.bindings import nvrtc

    number = arch.removeprefix("sm")
    parts = ['#include "multiattn/ptx.cuh"\nusing namespace multiattn;\nstruct alignas(16) Lane { uint32 word[16]; };']
    for index, verb in enumerate(VERBS):
        if int(number) >= verb.oldest:
            head = f'extern "C" __global__ void verb_{index}(const Lane* lanes, uint32* out, SharedAddress smem)'
            parts.append(f"{head} {{ const uint32* in = lanes[thread_index()].word; {verb.body} }}")
    options = [f"-arch=sm_{number}", "-std=c++17", *(f"-I{directory}" for directory in DEVICE_INCLUDES)]

    def ask(function: Any, *arguments: Any) -> Any:
        status, *rest = function(*arguments)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
            nvrtc.nvrtcGetProgramLog(program, log)
            raise InputError(f"{arch}: {function.__name__} {status.name}: {bytes(log).decode()}")
        return rest[0] if rest else None

    _, program = nvrtc.nvrtcCreateProgram("\n".join(parts).encode(), b"verbs.cu", 0, [], [])
    ask(nvrtc.nvrtcCompileProgram, program, len(options), [option.encode() for option in options])
    cubin = bytearray(ask(nvrtc.nvrtcGetCUBINSize, program))
    ask(nvrtc.nvrtcGetCUBIN, program, cubin)
    ptx = bytearray(ask(nvrtc.nvrtcGetPTXSize, program))
    ask(nvrtc.nvrtcGetPTX, program, ptx)
    nvrtc.nvrtcDestroyProgram(program)
    return _Compiled(cubin=bytes(cubin), ptx=ptx.decode())
