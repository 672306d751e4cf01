"""The public calls: `fmha`, `fmha_backward`, `explain`, `backends`. Orchestration: others decide, and others run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NoReturn, overload

import torch

from multiattn.kvcache import Where, with_cache
from multiattn.mask import Window
from multiattn.operands import Operands, Options, ScoreMod, with_score
from multiattn.plan import backend as registry
from multiattn.plan.arch import by_name as arch_by_name
from multiattn.plan.arch import detect
from multiattn.plan.backend import BACKENDS, DIRECTIONS, Direction, Plan
from multiattn.plan.choice import BOTH, choose
from multiattn.plan.support import Reason, Unsupported
from multiattn.plan.toolchain import probe_gpu
from multiattn.problem import Problem, problem_of
from multiattn.run import compat
from multiattn.run.autograd import attend, autocast, differentiate, needs_grad, refuse_gradient
from multiattn.run.tuning import tuning_for
from multiattn.validate import hides_unknown, refuse_unknown
from multiattn.varlen import Lengths, pack, with_packing

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from multiattn.plan.tuning import Tuning


@overload
def fmha(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = ...,
    window: Window | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    alibi_slopes: torch.Tensor | None = ...,
    bias: torch.Tensor | None = ...,
    sinks: torch.Tensor | None = ...,
    score_mod: ScoreMod | None = ...,
    block_mask: BlockMask | None = ...,
    backend: str = ...,
    variant: str | None = ...,
    return_lse: Literal[False] = ...,
    deterministic: bool | None = ...,
) -> torch.Tensor: ...


@overload
def fmha(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = ...,
    window: Window | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    alibi_slopes: torch.Tensor | None = ...,
    bias: torch.Tensor | None = ...,
    sinks: torch.Tensor | None = ...,
    score_mod: ScoreMod | None = ...,
    block_mask: BlockMask | None = ...,
    backend: str = ...,
    variant: str | None = ...,
    return_lse: Literal[True],
    deterministic: bool | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@hides_unknown
def fmha(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    backend: str = "auto",
    variant: str | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    **unknown: NoReturn,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Fused multi-head attention: ``softmax(scale * q @ k^T + mask) @ v``, differentiable once.

    Args:
        q: ``[B, Hq, Sq, D]``, fp16 or bf16, any strides with unit stride on D.
        k: ``[B, Hkv, Skv, D]`` with ``Hq % Hkv == 0`` (GQA, MQA); dtype and device of q.
        v: like k.
        causal: bottom-right aligned: key j is visible to query i when ``j <= i + Skv - Sq``.
        window: a pair (left, right): with ``d = Skv - Sq``, query i sees the keys from ``i + d - left`` to
            ``i + d + right``, both included; None in it is all keys of that side. Ints from 0 on. `causal` bounds it
            on the right, so that ``window=(1023, None), causal=True`` is the last 1024 keys.
        scale: finite, may be zero or negative; None is ``1/sqrt(D)``.
        softcap: positive: scores become ``softcap * tanh(score / softcap)``, before all that follows.
        alibi_slopes: fp32 ``[Hq]`` or ``[B, Hq]``: scores lose ``slope * |i + Skv - Sq - j|``.
        bias: ``[B|1, Hq|1, Sq|1, Skv|1]``, any strides, dtype of q or fp32; it is added, and -inf hides a key.
        score_mod: FlexAttention's ``(score, b, h, q_idx, kv_idx) -> score``, on 0-d tensors, last of these. It is run
            once for an expression (`multiattn.score`), which becomes code of each kernel's language.
        block_mask: FlexAttention's `BlockMask`: blocks that it leaves out cost nothing. It hides keys beside those that
            `causal` and `window` do.
        sinks: ``[Hq]``, any floating-point dtype: for each query head the natural-log logit of one more column, which
            is not scaled and has no value. Differentiable.
        backend: one of `backends()`, ``"reference"``, or ``"auto"``: on a GPU the fastest by recorded measurements, by
            those that ``multiattn tune`` made on this GPU first, and on CPU tensors the reference. A named backend runs
            or raises; nothing falls back. On CPU tensors it runs its kernel source on the CPU (Triton plain
            `triton.language`, and Gluon where its variant is named): exact, and slow. The gradient is the same
            backend's; ``"auto"`` chooses it by its own measurements.
        variant: a variant of that backend's forward; None is its best that can run the problem.
        return_lse: also return the log-sum-exp.
        deterministic: run only variants that give the same bits each time, at some cost in the backward; None does as
            `torch.use_deterministic_algorithms` says.

    Returns:
        out, dtype of q, ``[B, Hq, Sq, D]`` (in memory ``[B, S, H, D]`` where q is); with `return_lse` also lse, fp32
        ``[B, Hq, Sq]``: the natural log of the sum of exp of scaled scores, sink included. A row that sees no key has
        ``out = 0`` and ``lse = -inf`` (with a sink: ``lse = sink``), and gives zero gradients. Both are
        differentiable.

    Raises:
        TypeError, ValueError: an input that is wrong for every backend.
        Unsupported: the backend cannot run this problem here; `.reasons` says why. Where an input requires grad, the
            backward is planned here too, and what it refuses is told here.
        NotImplementedError: when a gradient is differentiated again; `multiattn.reference` is for that.

    The launch goes to the current stream of the tensors' device, without synchronising. Under `torch.compile`,
    `torch.export`, `torch.func`, dispatch modes and profilers it is the op ``torch.ops.multiattn.fmha_forward``. Under
    `torch.autocast` q, k and v are taken in its dtype, as scaled_dot_product_attention takes them. On the device
    ``meta`` nothing is launched or refused, and results have their shapes and strides. Source of the algorithm: Dao,
    "FlashAttention-2" (arXiv 2307.08691), Algorithms 1 and 2.
    """
    if unknown:
        refuse_unknown("fmha", unknown)
    options = Options.of(
        causal=causal,
        window=window,
        scale=scale,
        has_sinks=sinks is not None,
        backend=backend,
        variant=variant,
        deterministic=deterministic,
    )
    if compat.autocast_active():
        q, k, v = autocast(q, k, v)
    operands = Operands(q, k, v, sinks=sinks)
    if not (softcap is None and alibi_slopes is None and bias is None and score_mod is None and block_mask is None):
        operands, options = with_score(operands, options, softcap, alibi_slopes, bias, score_mod, block_mask)
    out, lse = attend(operands, options)
    return (out, lse) if return_lse else out


@hides_unknown
def fmha_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    *,
    dlse: torch.Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    backend: str = "auto",
    variant: str | None = None,
    deterministic: bool | None = None,
    **unknown: NoReturn,
) -> tuple[torch.Tensor, ...]:
    """The gradient of `fmha` from what a forward saved, for callers without autograd.

    Args:
        q, k, v, and all from causal to block_mask, deterministic: as for `fmha`, and as they were there.
        out: what a forward of any backend gave, dtype and shape of q; so is lse, fp32 ``[B, Hq, Sq]``.
        dout: gradient of out, like it.
        dlse: gradient of lse, like it; None where nothing depends on lse.
        backend: as for `fmha`, whichever ran the forward. ``"auto"`` on a GPU follows recorded measurements of
            backward; where an arch has none yet, those of forward.
        variant: a variant of that backend's backward; None is its best that can run the problem.

    Returns:
        dq, dk and dv: dtype and shapes of q, k and v, each in memory ``[B, S, H, D]`` where that is. dk and dv of a
        key/value head are summed, in fp32, over the query heads that share it. With sinks also dsinks, like sinks. Then
        the gradient of each of alibi_slopes, bias and what `score_mod` captures that requires one, in this order.

    Raises:
        TypeError, ValueError, Unsupported: as for `fmha`.

    out, lse, dout and dlse may have any strides. The kernels read out and dout in the layout that `fmha` gives out,
    lse and dlse contiguous, all from addresses that are multiples of 16 bytes; whatever is laid out otherwise, as an
    expanded or transposed dout is, costs a copy.
    """
    if unknown:
        refuse_unknown("fmha_backward", unknown)
    options = Options.of(
        causal=causal,
        window=window,
        scale=scale,
        has_sinks=sinks is not None,
        backend=backend,
        variant=variant,
        deterministic=deterministic,
    )
    if not isinstance(dout, torch.Tensor):
        raise TypeError(f"dout must be a torch.Tensor; got {type(dout).__name__}")
    operands = Operands(q, k, v, out, lse, dout, dlse, sinks=sinks)
    with torch.enable_grad():  # who asks for a gradient is a matter of tensors here
        operands, options = with_score(operands, options, softcap, alibi_slopes, bias, score_mod, block_mask)
    gradients = differentiate(operands, options)
    plain = len(operands.inputs) - len(operands.captured)
    of_captured = (it for it in gradients[plain:] if it is not None)
    return (*gradients[:plain], *of_captured)  # type: ignore[arg-type]  # the others are there, as dout is


@hides_unknown
def explain(
    q: torch.Tensor | Problem,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    seqlens_kv: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    num_splits: int | None = None,
    backend: str = "auto",
    variant: str | None = None,
    arch: str | None = None,
    direction: Direction = "forward",
    deterministic: bool | None = None,
    **unknown: NoReturn,
) -> Plan | tuple[Reason, ...]:
    """The Plan that `fmha` would launch for these arguments, or every reason why it would refuse.

    With `cu_seqlens_kv` that of `fmha_varlen`, with `seqlens_kv` that of `fmha_kvcache`.

    A problem without queries or without keys has a Plan like any other, but launches no kernel: there is nothing to do,
    or every row is empty. `Plan.describe` prints a Plan in lines.

    Args:
        q, k, v: as for `fmha`; or one `Problem` in place of all three, with `arch`. Tensors that require grad are
            refused here, as there, where either direction is.
        all from causal to deterministic: as for `fmha` (a Problem has its own of those before backend).
        cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv: as for `fmha_varlen`, whose q, k and v these are then.
        seqlens_kv, page_table, cu_seqlens_q, max_seqlen_q, num_splits: as for `fmha_kvcache`, whose q, k_cache and
            v_cache are q, k and v then.
        arch: explain for this arch (``"sm80"``) instead of the tensors' device. Then only the data is asked, not
            whether this machine has such a GPU.
        direction: ``"backward"``: the Plan of the gradient, from autograd where tensors require grad, else from
            `fmha_backward`. ``"auto"`` chooses each direction by its own measurements. A cache has no gradient.

    Raises:
        TypeError, ValueError, NotImplementedError: as the call that is explained.
    """
    if unknown:
        refuse_unknown("explain", unknown)
    if direction not in DIRECTIONS:
        raise ValueError(f"direction: got {direction!r}; allowed {', '.join(DIRECTIONS)}")
    directions: tuple[Direction, ...] = (direction,)
    tuning: Tuning | None = None
    if seqlens_kv is None:
        _refuse_given({"page_table": page_table, "num_splits": num_splits}, "without seqlens_kv")
    elif direction != "forward":
        raise ValueError(f"direction: got {direction!r}; allowed forward with seqlens_kv: a cache has no gradient")
    options = Options.of(
        causal=causal,
        window=window,
        scale=scale,
        has_sinks=sinks is not None,
        backend=backend,
        variant=variant,
        deterministic=deterministic,
    )
    if isinstance(q, Problem):
        if arch is None:
            raise ValueError("explain(Problem) needs arch=, as there is no tensor whose device would tell it")
        target = arch_by_name(arch)
        given = (k, v, window, scale, softcap, alibi_slopes, bias, sinks, score_mod, block_mask, cu_seqlens_q)
        if causal or any(it is not None for it in (*given, seqlens_kv)):
            raise TypeError("explain(Problem) takes q alone, as the Problem has its own mask, scale, scores and sinks")
        problem = q
    elif k is None or v is None:
        raise TypeError("explain needs q, k and v, or one Problem")
    else:
        packing = (cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
        changes = (softcap, alibi_slopes, bias, score_mod)
        if seqlens_kv is not None:
            named = {"alibi_slopes": alibi_slopes, "bias": bias, "score_mod": score_mod, "block_mask": block_mask}
            named |= {"cu_seqlens_kv": cu_seqlens_kv, "max_seqlen_kv": max_seqlen_kv}
            _refuse_given(named, "with seqlens_kv: fmha_kvcache has no such argument")
            where = Where(seqlens_kv, page_table, cu_seqlens_q, max_seqlen_q, num_splits)
            operands, options = with_cache(q, k, v, options, where, softcap, sinks)
            refuse_gradient(operands)
        elif all(it is None for it in packing):
            operands, options = with_score(Operands(q, k, v, sinks=sinks), options, *changes, block_mask)
        else:
            lengths = Lengths(*packing)  # type: ignore[arg-type]  # `pack` refuses None
            operands = pack(q, k, v, lengths, block_mask)._replace(sinks=sinks)
            operands, options = with_packing(operands, options, lengths, *changes)
        problem = problem_of(operands, options)
        target = detect(q.device) if arch is None else arch_by_name(arch)
        tuning = tuning_for(q.device) if arch is None else None
        from_autograd = needs_grad(operands) and (direction == "forward" or variant is None)
        directions = BOTH if from_autograd else directions
    try:
        plans = choose(problem, target, options, *directions, probe=arch is None, tuning=tuning)
    except Unsupported as error:
        return error.reasons
    return plans[directions.index(direction)]


def _refuse_given(named: Mapping[str, object], why: str) -> None:
    """TypeError for an argument that is not None."""
    for name, value in named.items():
        if value is not None:
            raise TypeError(f"{name}: got {type(value).__name__}; allowed None {why}")


def backends(device: torch.device | str | None = None) -> Mapping[str, tuple[Reason, ...]]:
    """Every backend, with the reasons why this machine cannot run it on `device`; none if it can.

    `device` None is the current GPU where there is one, else the CPU.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: got {device}; allowed cpu and cuda")
    if device.type == "cuda" and (reasons := probe_gpu()):
        return dict.fromkeys(BACKENDS, reasons)
    target = detect(device)
    return {name: registry.get(name).probe(target) for name in BACKENDS}
