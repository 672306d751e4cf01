"""Peers over a cache: cuDNN through SDPA and by its own graphs, FlashAttention-3, vLLM's build of it, 4, FlashInfer.

Each is optional and imported only when it runs. All read the same copies of the same cache, one copy after another;
plans and graphs are made before anything is timed. Where a peer leaves a choice to its caller, each choice is tried in
the cell, and the fastest takes part: the detail of its row names it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from bench.contenders import Ours, RefusedError, in_turns
from bench.decode_cells import LARGEST_NUMBER, DecodeCell, Served, starts_of
from bench.matrix import Cell, Tensors
from bench.peers import Peer, Provider, find_peers, out_of
from multiattn.plan.backend import BACKENDS
from multiattn.plan.support import Reason
from multiattn.tune.timing import Budget, Call, Contestant, CudaClock, Timing, measure

SPLITS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
"""Parts that FlashAttention-3 splits keys into; 0 is its own choice."""
TRIAL = Budget(rounds=3, sample_ms=1.0, warmup_ms=1.0)
"""The time for each choice of a peer."""
WORKSPACE_BYTES = 512 << 20
"""Room for FlashInfer's partial results."""


def on_each(served: Served, attend: Callable[[torch.Tensor, torch.Tensor], Any]) -> Call:
    """A call of keys and values, with those of each copy of the cache in turns."""
    return in_turns([functools.partial(attend, *it) for it in served.caches])


def fastest(choices: Mapping[str, Call]) -> tuple[Call, str]:
    """The fastest of some calls, and its name; if none runs, what the first raised."""
    if len(choices) == 1:
        ((name, only),) = choices.items()
        return only, name
    contestants = {name: Contestant(call=call) for name, call in choices.items()}
    found = measure(contestants, CudaClock(), regime="graph", budget=TRIAL)
    times = {name: it.time_ms for name, it in found.items() if isinstance(it, Timing)}
    if not times:
        raise next(it for it in found.values() if isinstance(it, Exception))
    best = min(times, key=lambda name: times[name])
    return choices[best], best


# ---------------------------------------------------------------- what peers share


def _over(build: Callable[[DecodeCell, Served], Mapping[str, Call] | Iterator[tuple[str, Call]]]) -> Any:
    """The `build` of a Peer, from a function that makes its choices by name."""

    def made(cell: Cell, tensors: Any) -> tuple[Call, str]:
        assert isinstance(cell, DecodeCell)
        return fastest(dict(build(cell, tensors)))

    return made


Widths = Callable[[DecodeCell], str]
"""Says what a peer accepts where it does not accept the widths of a cell, else nothing."""


def _any(cell: DecodeCell) -> str:
    return ""


def _refuse(
    *,
    dense: bool = True,
    paged: bool = True,
    mixed: bool = True,
    causal: bool = True,
    e4m3: bool = False,
    widths: Widths = _any,
) -> Any:
    """The `refuse` of a Peer that lacks some of these; `e4m3`: caches with scales of heads. None has scores."""

    def reasons(cell: Cell, tensors: Tensors) -> tuple[Reason, ...]:
        assert isinstance(cell, DecodeCell)
        found = []
        if allowed := widths(cell):
            found.append(Reason(code="head_dim", got=str(cell.widths), allowed=allowed))
        if not (dense if cell.page is None else paged):
            found.append(Reason(code="cache", got=cell.cache, allowed="dense" if dense else "pages"))
        if cell.mixed and not mixed:
            found.append(Reason(code="batch", got="packed queries", allowed="as many queries of each sequence"))
        if cell.feature != "none":
            found.append(Reason(code="feature", got=cell.feature, allowed="none"))
        if cell.stored is not None and (not e4m3 or cell.stored != "e4m3" or cell.per_token):
            numbers = f"{cell.dtype}, e4m3 with scales of heads" if e4m3 else cell.dtype
            scales = "tokens" if cell.per_token else "heads"
            found.append(Reason(code="stored", got=f"{cell.stored} with scales of {scales}", allowed=numbers))
        if cell.causal and not causal:
            hint = "its causal mask begins at the top left"
            found.append(Reason(code="queries", got=str(cell.queries), allowed="1", hint=hint))
        return tuple(found)

    return reasons


def _tokens_first(tensor: torch.Tensor) -> torch.Tensor:
    """``[B, S, H, D]`` of ``[B, H, S, D]``; packed queries as they are."""
    return tensor if tensor.dim() == 3 else tensor.transpose(1, 2)


# ---------------------------------------------------------------- cuDNN


def _build_sdpa(cell: DecodeCell, served: Served) -> dict[str, Call]:
    sdpa: Callable[..., torch.Tensor] = torch.nn.functional.scaled_dot_product_attention
    options = {"enable_gqa": cell.heads_kv is not None}
    return {"": on_each(served, functools.partial(sdpa, served.q, **options))}


@functools.cache
def _handle() -> Any:
    return importlib.import_module("cudnn").create_handle()


def _build_cudnn(cell: DecodeCell, served: Served) -> dict[str, Call]:
    """A graph of its frontend, built once and executed on each copy of the cache."""
    cudnn = importlib.import_module("cudnn")
    handle, q = _handle(), served.q
    dtype = getattr(cudnn.data_type, {"bf16": "BFLOAT16", "fp16": "HALF"}[cell.dtype])
    out = cell.empty_out(served)
    lengths_q = torch.tensor(cell.lengths_q, dtype=torch.int32, device=q.device)
    given = {name: it.view(-1, 1, 1, 1) for name, it in (("q", lengths_q), ("kv", served.seqlens_kv))}
    graph = cudnn.pygraph(
        io_data_type=dtype,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    k_cache, v_cache = served.caches[0]
    k, v = graph.tensor_like(k_cache), graph.tensor_like(v_cache)
    lengths = {name: graph.tensor_like(it) for name, it in given.items()}
    pack: dict[Any, torch.Tensor] = {lengths[name]: it for name, it in given.items()}
    more: dict[str, Any] = {}
    if served.page_table is not None:
        table = served.page_table[:, None, :, None]
        for name in ("k", "v"):
            more[f"paged_attention_{name}_table"] = node = graph.tensor_like(table)
            pack[node] = table
        more["paged_attention_max_seq_len_kv"] = cell.seq
    if cell.causal:
        more |= {"diagonal_alignment": cudnn.diagonal_alignment.BOTTOM_RIGHT, "diagonal_band_right_bound": 0}

    def padded(rows: torch.Tensor) -> tuple[Sequence[int], Sequence[int]]:
        """Sizes and strides; of packed rows as of padded ones, each of which begins where it does."""
        if served.cu_seqlens_q is None:
            return rows.shape, rows.stride()
        token, head, _ = rows.stride()
        return (cell.batch, cell.heads, cell.queries, rows.shape[-1]), (cell.queries * token, head, token, 1)

    def set_starts(node: Any, rows: torch.Tensor) -> None:
        """Say where the rows of each sequence begin."""
        if served.cu_seqlens_q is not None:
            starts = (served.cu_seqlens_q.long() * rows.stride(0)).view(-1, 1, 1, 1)
            pack[ragged := graph.tensor_like(starts)] = starts
            node.set_ragged_offset(ragged)

    shape, strides = padded(q)
    query = graph.tensor(dim=shape, stride=strides, data_type=dtype)
    set_starts(query, q)
    result, _ = graph.sdpa(
        name="sdpa",
        q=query,
        k=k,
        v=v,
        is_inference=True,
        attn_scale=cell.head_dim**-0.5,
        use_padding_mask=True,
        seq_len_q=lengths["q"],
        seq_len_kv=lengths["kv"],
        **more,
    )
    shape, strides = padded(out)
    result.set_output(True).set_dim(shape).set_stride(strides)
    set_starts(result, out)
    try:
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    except cudnn.cudnnGraphNotSupportedError as error:
        reason = Reason(code="peer", got=str(error).strip() or "not supported", allowed="what cuDNN accepts")
        raise RefusedError((reason,)) from None
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=q.device)

    def execute(k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(q.device).cuda_stream)
        graph.execute({**pack, query: q, k: k_cache, v: v_cache, result: out}, workspace, handle=handle)
        return out

    return {f"cuDNN {cudnn.backend_version()}": on_each(served, execute)}


# ---------------------------------------------------------------- FlashAttention


def _is_absorbed(cell: DecodeCell) -> bool:
    """True where FlashAttention-3 takes the latent columns of q apart, beside the 64 others."""
    return cell.latent and cell.head_dim - cell.width_v == 64


def _up_to_256(cell: DecodeCell) -> str:
    return "" if cell.head_dim <= 256 else "up to 256"


def _up_to_256_or_absorbed(cell: DecodeCell) -> str:
    return "" if _is_absorbed(cell) else _up_to_256(cell)


def _of_vllm(cell: DecodeCell) -> str:
    return "" if _is_absorbed(cell) and cell.width_v == 512 else _up_to_256(cell)


def _of_wheel(cell: DecodeCell) -> str:
    return "" if cell.widths == (128, 128) else "128"


def _parted(cell: DecodeCell, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows of q or of keys as FlashAttention-3 takes them, and their latent columns, if it takes these apart."""
    if not _is_absorbed(cell):
        return rows, None
    return rows[..., cell.width_v :], rows[..., : cell.width_v]


def _fa3(module: str) -> Peer:
    """FlashAttention-3 from upstream's package, or from the wheel through `bench.peers_jax`."""

    def build(cell: DecodeCell, served: Served) -> dict[str, Call]:
        function = importlib.import_module(module).flash_attn_with_kvcache
        options = cell.arguments(served)
        options["cache_seqlens"] = options.pop("seqlens_kv")
        q, latent = _parted(cell, _tokens_first(served.q))
        options |= {} if latent is None else {"qv": latent}

        def attend(splits: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, _ = _parted(cell, k.transpose(1, 2))
            out: torch.Tensor = function(q, keys, v.transpose(1, 2), **options, num_splits=splits)
            return _tokens_first(out)

        return {f"num_splits={it}": on_each(served, functools.partial(attend, it)) for it in SPLITS}

    (known,) = find_peers(("fa3",))
    assert known.instead is not None
    if module == known.module:
        refuse = _refuse(widths=_up_to_256_or_absorbed)
        return replace(known, build=_over(build), refuse=refuse, instead=_fa3("bench.peers_jax"))
    return replace(known.instead, build=_over(build), refuse=_refuse(widths=_of_wheel))


def _in_e4m3(cell: DecodeCell, served: Served) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
    """q in the dtype of the cache, as FlashAttention-3 takes it, and scales ``[B, Hkv]`` of q, k and v."""
    if cell.stored is None:
        return served.q, (None, None, None)
    grouped = served.q.unflatten(1, (-1, cell.group)).float()
    scale = grouped.abs().amax((2, 3, 4)) / LARGEST_NUMBER["e4m3"]
    numbers = (grouped / scale[..., None, None, None]).to(torch.float8_e4m3fn).flatten(1, 2)
    return numbers, (scale, *served.scales.values())


def forward_of_vllm(module: str) -> Callable[..., Sequence[torch.Tensor]]:
    """The forward of an extension module of vLLM's, which registers it as an op when it is loaded."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    torch.ops.load_library(spec.origin)
    found: Callable[..., Sequence[torch.Tensor]] = torch.ops._vllm_fa3_C.fwd
    return found


def _fa3_of_vllm(*modules: str) -> Peer:
    """FlashAttention-3 as vLLM 0.26 builds it, in its package or by itself; the first of `modules` that is there."""
    module, *others = modules

    def build(cell: DecodeCell, served: Served) -> dict[str, Call]:
        given, scales = _in_e4m3(cell, served)
        forward, (q, latent) = forward_of_vllm(module), _parted(cell, _tokens_first(given))
        where = (
            *(None, None, latent, None),  # new keys and values, the latent part of q, out
            *(served.cu_seqlens_q, None, None, None, served.seqlens_kv),
            *(max(cell.lengths_q), None if served.page_table is None else cell.seq, served.page_table),
            *(*(None,) * 5, *scales),  # entries of the batch, padding on the left, rotations
            *(cell.head_dim**-0.5, cell.causal, -1, -1, 0.0, True, None),  # no window, no softcap, no plan of its own
        )
        behind = None, 0, None, 1, 0, None  # heads packed as it likes, no SMs left free, no sinks, one GPU

        def attend(splits: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, _ = _parted(cell, k.transpose(1, 2))
            return _tokens_first(forward(q, keys, v.transpose(1, 2), *where, splits, *behind)[0])

        return {f"num_splits={it}": on_each(served, functools.partial(attend, it)) for it in SPLITS}

    return Peer(
        name="fa3-vllm",
        module=module,
        install="pip install vllm",
        build=_over(build),
        refuse=_refuse(widths=_of_vllm, e4m3=True),
        values=True,
        instead=_fa3_of_vllm(*others) if others else None,
    )


def _build_fa4(cell: DecodeCell, served: Served) -> dict[str, Call]:
    function = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    options = {**cell.arguments(served), "max_seqlen_q": cell.queries}
    options["seqused_k"] = options.pop("seqlens_kv")
    q = _tokens_first(served.q)

    def attend(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _tokens_first(out_of(function(q, k.transpose(1, 2), v.transpose(1, 2), **options)))

    return {"keys not split": on_each(served, attend)}


# ---------------------------------------------------------------- FlashInfer


def _build_flashinfer(cell: DecodeCell, served: Served) -> Iterator[tuple[str, Call]]:
    """Decode's wrapper with and without tensor cores, or prefill's for chunks; as for a CUDA graph, planned before."""
    flashinfer = importlib.import_module("flashinfer")
    assert served.page_table is not None
    assert cell.page is not None
    device, page = served.q.device, cell.page
    pages = [-(-length // page) for length in cell.lengths_kv]
    indptr = starts_of(pages, device)
    indices = torch.cat([row[:count] for row, count in zip(served.page_table, pages, strict=True)])
    last = torch.tensor([(length - 1) % page + 1 for length in cell.lengths_kv], dtype=torch.int32, device=device)
    heads = cell.heads, cell.heads // cell.group, cell.head_dim, page
    shared = {"q_data_type": served.q.dtype, "kv_data_type": served.q.dtype}
    packed = served.q if cell.mixed else served.q.transpose(1, 2).flatten(0, 1)  # [T, Hq, D]

    def calls_of(wrapper: Any) -> Call:
        def attend(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = wrapper.run(packed, (k.transpose(1, 2), v.transpose(1, 2)))
            return out if cell.mixed else out.unflatten(0, (cell.batch, cell.queries)).transpose(1, 2)

        return on_each(served, attend)

    workspace = functools.partial(torch.zeros, WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    if cell.mixed or not cell.has_rate_of_memory:
        starts = starts_of(cell.lengths_q, device)
        buffers = [it.clone() for it in (starts, indptr, indices, last)]
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", True, *buffers, backend="fa2")
        wrapper.plan(starts, indptr, indices, last, *heads, causal=True, **shared)
        yield "prefill, fa2", calls_of(wrapper)
        return
    for tensor_cores in (True, False):
        if tensor_cores or (cell.queries == 1 and cell.group in (1, 2, 4, 8)):
            buffers = [it.clone() for it in (indptr, indices, last)]
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace(), "NHD", True, tensor_cores, *buffers, backend="fa2"
            )
            wrapper.plan(indptr, indices, last, *heads, **shared, q_len_per_req=cell.queries)
            yield "tensor cores" if tensor_cores else "CUDA cores", calls_of(wrapper)


# ---------------------------------------------------------------- everybody


def _peers() -> tuple[Peer, ...]:
    (sdpa,) = find_peers(("sdpa-cudnn",))
    (fa4,) = find_peers(("fa4",))
    return (
        replace(
            sdpa,
            build=_over(_build_sdpa),
            refuse=_refuse(paged=False, mixed=False, causal=False, widths=_up_to_256),
        ),
        Peer(
            name="cudnn",
            module="cudnn",
            install="pip install nvidia-cudnn-frontend",
            build=_over(_build_cudnn),
            refuse=_refuse(),
            values=True,
        ),
        _fa3("flash_attn_interface"),
        _fa3_of_vllm("vllm.vllm_flash_attn._vllm_fa3_C", "_vllm_fa3_C"),
        replace(fa4, build=_over(_build_fa4), refuse=_refuse(widths=_up_to_256)),
        Peer(
            name="flashinfer",
            module="flashinfer",
            install="pip install flashinfer-python",
            build=_over(_build_flashinfer),
            refuse=_refuse(dense=False),
        ),
    )


PEERS: tuple[Peer, ...] = _peers()
"""Every peer. A module that is there but breaks is an error of its cell, never the end of a run."""


def providers(backends: Sequence[str] = BACKENDS, peers: Sequence[str] | None = None) -> tuple[Provider, ...]:
    """The providers of some backends and peers, all by default, in the order in which tables have them."""
    ours = (Ours(backend=name) for name in BACKENDS if name in backends)
    return (*ours, *(peer for peer in PEERS if peers is None or peer.name in peers))
