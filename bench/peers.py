"""Peers to compare with: SDPA's three kernels, FlexAttention, flash-attn 2, 3 and 4, cuDNN Frontend, TileGym.

Each is optional and imported only when it runs; none is a dependency, and none is an entry of BACKENDS. Cells have
Sq = Skv, where every peer means the same by `causal`. A peer's backward is its own, through autograd: PyTorch walks the
graph of one forward again and again. With sinks it is asked for their gradient, too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.contenders import Contender, Ours, RefusedError, Results, alike, differentiate, named, require_grad
from bench.features import FEATURES, LISTS, PACKED, SOFTCAP, WITHOUT_LISTS, Feature, ids_of, slopes_of
from bench.matrix import Cell, Tensors
from bench.results import NO_GPU
from multiattn.mask import KINDS, Kind
from multiattn.plan.arch import Arch
from multiattn.plan.support import Reason
from multiattn.tune.timing import Call, Contestant


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """Another project's attention: where it lives, what it accepts, and how it is called."""

    name: str
    module: str
    install: str
    build: Callable[[Cell, Tensors], tuple[Call, str]]
    """The call of its forward, and a word on how that is made."""
    refuse: Callable[[Cell, Tensors], tuple[Reason, ...]] = lambda cell, tensors: ()
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    masks: tuple[Kind, ...] = ("full", "causal")
    features: tuple[Feature, ...] = ("none",)
    values: bool = False
    """It takes v of a head_dim of its own, some of them at least."""
    hint: str = ""
    """On masks and features that it has no way to ask for."""
    arches: tuple[str, ...] = ()
    """Those that it is built for; empty where it does not matter."""
    instead: Peer | None = None
    """Another build of the same kernels, which stands in where `module` is missing."""
    is_ours: bool = False

    @property
    def installed(self) -> Peer:
        """The build that is here; this one where there is none."""
        if self.instead is None or not _import_problem(self.module) or _import_problem(self.instead.module):
            return self
        return self.instead

    def why_not(self, cell: Cell, arch: Arch | None) -> tuple[Reason, ...]:
        """Every reason known before there is a tensor; `arch` None is a machine without a GPU."""
        if (build := self.installed) is not self:
            return build.why_not(cell, arch)
        problem = _import_problem(self.module)
        found = [Reason(code="module", got=problem, allowed=self.module, hint=self.install)] if problem else []
        if cell.band.kind not in self.masks:
            found.append(Reason(code="mask", got=cell.mask, allowed=", ".join(self.masks), hint=self.hint))
        if cell.feature not in self.features:
            found.append(Reason(code="feature", got=cell.feature, allowed=", ".join(self.features), hint=self.hint))
        if cell.head_dim_v is not None and not self.values:
            found.append(Reason(code="head_dim_v", got=str(cell.head_dim_v), allowed=f"{cell.head_dim}, that of k"))
        if self.arches and arch is not None and arch.name not in self.arches:
            found.append(Reason(code="arch", got=arch.name, allowed=", ".join(self.arches), hint=self.hint))
        return tuple(found) if arch is not None else (NO_GPU, *found)

    def prepare(self, cell: Cell, tensors: Tensors, arch: Arch) -> Contender:
        """The contender; RefusedError with reasons. What its code raises passes through."""
        if (build := self.installed) is not self:
            return build.prepare(cell, tensors, arch)
        tensors = tensors if cell.direction == "fwd" else require_grad(tensors)
        reasons = self.why_not(cell, arch) or self.refuse(cell, tensors)
        if reasons:
            raise RefusedError(reasons)
        call, detail = self.build(cell, tensors)
        if cell.direction != "fwd":
            with self.context():
                out = call()
            if not out.requires_grad:
                allowed = f"forward: {self.name} has no gradient"
                raise RefusedError((Reason(code="direction", got=cell.direction, allowed=allowed),))
            dout = alike(out, cell.dout(out.device))
            call = differentiate(call, tensors, dout, keeps_graph=cell.direction == "bwd")
            detail = f"{detail}, torch.autograd.grad".removeprefix(", ")
        contestant = Contestant(call=call, context=self.context)

        def output() -> Results:
            with self.context():
                return named(call())

        return Contender(launch=contestant, call=contestant, output=output, detail=detail)


@functools.cache
def _import_problem(module: str) -> str:
    """Why `module` cannot be found, or nothing; its parents are imported for that, itself it is not."""
    try:
        return "" if importlib.util.find_spec(module) is not None else f"no module named {module!r}"
    except ImportError as error:  # a parent is missing, or is there and does not load
        return str(error)


# ---------------------------------------------------------------- PyTorch


def _sdpa(name: str, backend: str, can_use: str) -> Peer:
    """One kernel of SDPA, forced; `can_use` names the function of torch.backends.cuda that knows what it accepts."""

    def build(cell: Cell, tensors: Tensors) -> tuple[Call, str]:
        sdpa: Callable[..., torch.Tensor] = torch.nn.functional.scaled_dot_product_attention
        return functools.partial(sdpa, *tensors, is_causal=cell.causal, enable_gqa=cell.heads_kv is not None), ""

    def refuse(cell: Cell, tensors: Tensors) -> tuple[Reason, ...]:
        q, k, v = tensors
        arguments = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, cell.causal, cell.heads_kv is not None)
        if getattr(torch.backends.cuda, can_use)(arguments):
            return ()
        with warnings.catch_warnings(record=True) as said, context():  # SDPA has no other way of saying why
            warnings.simplefilter("always")
            with contextlib.suppress(RuntimeError):  # "No available kernel"
                build(cell, tensors)[0]()
        told = " ".join(str(warning.message).split(" (Triggered")[0] for warning in said)
        return (Reason(code="peer", got=told or f"{can_use} is False", allowed=f"what {name} accepts"),)

    def context() -> contextlib.AbstractContextManager[Any]:
        manager: contextlib.AbstractContextManager[Any] = sdpa_kernel(getattr(SDPBackend, backend))
        return manager

    module, install, hint = "torch.nn.attention", "part of torch", "SDPA has no argument for it but a dense mask"
    return Peer(
        name=name, module=module, install=install, build=build, refuse=refuse, context=context, values=True, hint=hint
    )


@functools.lru_cache(maxsize=1)
def _compiled_flex(cell: Cell) -> Callable[..., torch.Tensor]:
    """flex_attention compiled for the sizes of one cell, as `torch.compile` does it unless told otherwise.

    `fullgraph`, as Flex run eagerly by a recompile limit would be another algorithm in silence.
    """
    torch._dynamo.reset()
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    wanted = _with_sinks(flex) if cell.has_sinks else flex.flex_attention
    compiled: Callable[..., torch.Tensor] = torch.compile(wanted, dynamic=False, fullgraph=True)
    return compiled


def _with_sinks(flex: Any) -> Callable[..., torch.Tensor]:
    """Flex has no sink: out is scaled down afterwards, by what the sink leaves of the sum, of which lse tells."""
    asked = flex.AuxRequest(lse=True)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, **options: Any) -> torch.Tensor:
        out, aux = flex.flex_attention(q, k, v, return_aux=asked, **options)
        scaled: torch.Tensor = out * torch.sigmoid(aux.lse - sinks[:, None]).unsqueeze(-1).to(out.dtype)
        return scaled

    return attend


def _keep_graph() -> contextlib.AbstractContextManager[Any]:
    """Compiles Flex so that a backward can run twice: it must not overwrite what its forward saved."""
    config = importlib.import_module("torch._functorch.config")
    manager: contextlib.AbstractContextManager[Any] = config.patch(donated_buffer=False)
    return manager


def _build_flex(cell: Cell, tensors: Tensors) -> tuple[Call, str]:
    device = tensors[0].device
    options = {"score_mod": cell.score_mod(device), "block_mask": cell.block_mask(device)}
    call = functools.partial(_compiled_flex(cell), *tensors, **options, enable_gqa=cell.heads_kv is not None)
    return call, "torch.compile(dynamic=False)" + (", scaled by lse" if cell.has_sinks else "")


# ---------------------------------------------------------------- packages


Options = Callable[[Cell, Tensors], tuple[dict[str, Any], str]]
"""Arguments of a function for a cell, and a word on how they are made."""


def _flash_attn(
    name: str, module: str, install: str, features: tuple[Feature, ...], options_of: Options | None = None, **more: Any
) -> Peer:
    """``flash_attn_func(q, k, v, causal=, ...)`` of flash-attn 2, 3 and 4, which take ``[B, S, H, D]``."""

    def build(cell: Cell, tensors: Tensors) -> tuple[Call, str]:
        functions = importlib.import_module(module)
        if cell.is_packed:
            return _varlen(functions.flash_attn_varlen_func, cell, tensors), ""
        function = functions.flash_attn_func
        q, k, v = (tensor.transpose(1, 2) for tensor in tensors[:3])
        asked, detail = _flash_options(cell, tensors) if options_of is None else options_of(cell, tensors)

        def call() -> torch.Tensor:
            return out_of(function(q, k, v, **asked)).transpose(1, 2)

        return call, detail

    return Peer(name=name, module=module, install=install, build=build, masks=KINDS, features=features, **more)


def out_of(result: Any) -> torch.Tensor:
    """The output, beside which flash-attn 3 and 4 may return lse."""
    out: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return out


def _varlen(function: Callable[..., Any], cell: Cell, tensors: Tensors) -> Call:
    """The call of a packed batch, the same in flash-attn 2, 3 and 4."""
    q, k, v = (tensor[0].transpose(0, 1) for tensor in tensors[:3])
    cu_seqlens, longest = cell.cu_seqlens(q.device), max(cell.document_lengths)
    named: dict[str, Any] = {f"cu_seqlens_{side}": cu_seqlens for side in ("q", "k")}
    named |= {f"max_seqlen_{side}": longest for side in ("q", "k")}

    def call() -> torch.Tensor:
        return out_of(function(q, k, v, **named, causal=cell.causal)).transpose(0, 1).unsqueeze(0)

    return call


def _flash_options(cell: Cell, tensors: Tensors) -> tuple[dict[str, Any], str]:
    """The arguments that have the same names in 2, 3 and 4; only 2 has ALiBi among them."""
    found: dict[str, Any] = {"causal": cell.causal}
    if cell.window is not None:
        found["window_size"] = cell.window - 1, 0
    if cell.feature == "softcap30":
        found["softcap"] = SOFTCAP
    if cell.feature == "alibi":
        found["alibi_slopes"] = slopes_of(cell.heads, tensors[0].device)
    return found, ""


def _options_of_4(cell: Cell, tensors: Tensors) -> tuple[dict[str, Any], str]:
    """Also a sink; ALiBi is a score_mod here, and documents are a mask_mod with the blocks of Flex's BlockMask."""
    device = tensors[0].device
    if cell.feature == "alibi":
        mods = importlib.import_module("bench.peers_cute").alibi(cell.heads)
        return {"causal": cell.causal, **mods}, "score_mod"
    if cell.has_documents:
        documents = importlib.import_module("bench.peers_cute").documents
        found = documents(ids_of(cell.document_lengths, device), cell.block_mask(device), cell.causal)
        return found, "mask_mod, block-sparse"
    found, detail = _flash_options(cell, tensors)
    return found | ({"learnable_sink": tensors[3]} if cell.has_sinks else {}), detail


def _wheel_of_3() -> Peer:
    """FlashAttention-3 built ahead, for machines that cannot build upstream's package: `bench.peers_jax`."""

    def build(cell: Cell, tensors: Tensors) -> tuple[Call, str]:
        return functions.build(cell, tensors)[0], "wheel flash-attn3-jax"

    def refuse(cell: Cell, tensors: Tensors) -> tuple[Reason, ...]:
        found = []
        if cell.head_dim != 128:
            found.append(Reason(code="head_dim", got=str(cell.head_dim), allowed="128", hint=hint))
        if cell.dtype not in ("fp16", "bf16"):
            found.append(Reason(code="dtype", got=cell.dtype, allowed="fp16, bf16"))
        if not all(tensor.transpose(1, 2).is_contiguous() for tensor in tensors):
            found.append(Reason(code="strides", got=cell.layout, allowed="bshd", hint=hint))
        return tuple(found)

    functions = _flash_attn("fa3", "bench.peers_jax", "pip install --no-deps flash-attn3-jax==0.2.3", ("none", *PACKED))
    hint = "the wheel flash-attn3-jax has no more; upstream's package may"
    module = "flash_attn3_jax_lib.flash_api"
    return replace(functions, module=module, build=build, refuse=refuse, arches=("sm90",), hint=hint)


def _cudnn_frontend() -> Peer:
    def build(cell: Cell, tensors: Tensors) -> tuple[Call, str]:
        call: tuple[Call, str] = importlib.import_module("bench.peers_cudnn").build(cell, tensors)
        return call

    def refuse(cell: Cell, tensors: Tensors) -> tuple[Reason, ...]:
        if cell.heads_kv is None or cell.direction == "fwd":
            return ()
        return (Reason(code="heads", got=f"{cell.heads} on {cell.heads_kv}", allowed="as many heads of k as of q"),)

    random = tuple(it for it in LISTS if it.startswith("blocks"))
    module, install = "cudnn.block_sparse_attention", "pip install nvidia-cudnn-frontend"
    hint = "its block-sparse kernels alone are asked"
    return Peer(
        name="cudnn-frontend",
        module=module,
        install=install,
        build=build,
        refuse=refuse,
        masks=KINDS,
        features=random,
        hint=hint,
    )


def _build_tilegym(cell: Cell, tensors: Tensors) -> tuple[Call, str]:
    importlib.import_module("tilegym").set_backend("cutile")
    function = importlib.import_module("tilegym.ops").fmha
    scaling = cell.head_dim**-0.5
    return functools.partial(function, *tensors, scaling=scaling, is_causal=cell.causal), "cuTile backend, autotuned"


PEERS: tuple[Peer, ...] = (
    _sdpa("sdpa-flash", "FLASH_ATTENTION", "can_use_flash_attention"),
    _sdpa("sdpa-cudnn", "CUDNN_ATTENTION", "can_use_cudnn_attention"),
    _sdpa("sdpa-efficient", "EFFICIENT_ATTENTION", "can_use_efficient_attention"),
    Peer(
        name="flex",
        module="torch.nn.attention.flex_attention",
        install="part of torch",
        build=_build_flex,
        context=_keep_graph,
        masks=KINDS,
        features=FEATURES,
        values=True,
    ),
    _flash_attn(
        "fa2",
        "flash_attn.flash_attn_interface",
        "pip install flash-attn",
        features=("none", "softcap30", "alibi", *PACKED),
    ),
    _flash_attn(
        "fa3",
        "flash_attn_interface",
        "build flash-attention/hopper, or pip install --no-deps flash-attn3-jax==0.2.3",
        features=("none", "softcap30", *PACKED),
        values=True,
        instead=_wheel_of_3(),
    ),
    _flash_attn(
        "fa4",
        "flash_attn.cute",
        "pip install flash-attn-4",
        features=WITHOUT_LISTS,
        options_of=_options_of_4,
        values=True,
    ),
    _cudnn_frontend(),
    Peer(name="tilegym", module="tilegym.ops", install="pip install tilegym", build=_build_tilegym),
)
"""Every peer. A module that is there but breaks is an error of its cell, never the end of a run."""


Provider = Ours | Peer
"""Makes contenders; its name, unique in a run, names its rows."""


def find_peers(names: tuple[str, ...]) -> tuple[Peer, ...]:
    """The peers of these names, in the order of PEERS."""
    return tuple(peer for peer in PEERS if peer.name in names)
