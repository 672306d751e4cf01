"""The public calls: `fmha`, `fmha_backward`, `explain`, `backends`. Orchestration: others decide, and others run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NoReturn, overload

import torch

from multiattn.block_mask import BlockCounts
from multiattn.kvcache import Where, cached_call
from multiattn.mask import Window
from multiattn.meant import refuse_call, refuses_calls
from multiattn.operands import Operands, Options, ScoreMod, with_score
from multiattn.plan import backend as registry
from multiattn.plan.arch import by_name as arch_by_name
from multiattn.plan.arch import detect
from multiattn.plan.backend import BACKENDS, DIRECTIONS, BackendName, Direction, Plan
from multiattn.plan.choice import choose
from multiattn.plan.support import Reason, Unsupported
from multiattn.plan.toolchain import probe_gpu
from multiattn.problem import Problem, problem_of
from multiattn.run import compat
from multiattn.run.autograd import attend, attend_with_max, autocast, differentiate, needs_grad, refuse_gradient
from multiattn.run.tuning import tuning_for
from multiattn.signatures import CallOptions, ExplainOptions, Scores, dense_call, names_of, settled, takes
from multiattn.validate import not_a_tensor
from multiattn.varlen import Lengths, packed_call

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask
    from typing_extensions import Unpack

    from multiattn.plan.tuning import Tuning


_NAMES, _EXPLAINED = names_of(CallOptions), names_of(ExplainOptions)
_NOT_CACHED = ("cu_seqlens_kv", "max_seqlen_kv")
_CACHED_ALONE = ("page_table", "num_splits", "k_scale", "v_scale")
_OF_PROBLEM = {*Scores._fields, *Lengths._fields, "window", "scale", "sinks", "seqlens_kv", "return_max"}
"""Options of `explain` that a Problem has values of."""


@overload
def fmha(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_max: Literal[False] = ...,
    **options: Unpack[CallOptions],
) -> torch.Tensor: ...


@overload
def fmha(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[True],
    return_max: Literal[False] = ...,
    **options: Unpack[CallOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def fmha(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: bool,
    return_max: Literal[False] = ...,
    **options: Unpack[CallOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


@overload
def fmha(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_max: Literal[True],
    **options: Unpack[CallOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def fmha(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[True],
    return_max: Literal[True],
    **options: Unpack[CallOptions],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


@overload
def fmha(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: bool = ...,
    return_max: bool,
    **options: Unpack[CallOptions],
) -> torch.Tensor | tuple[torch.Tensor, ...]: ...


@refuses_calls
def fmha(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *extra: NoReturn,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    dropout_p: float = 0,  # no 0.0, for which torch.compile(dynamic=True) has a symbol and compiles twice
    dropout_seed: int | torch.Tensor | None = None,
    backend: BackendName = "auto",
    variant: str | None = None,
    return_lse: bool = False,
    return_max: bool = False,
    deterministic: bool | None = None,
    **unknown: NoReturn,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Fused multi-head attention: ``softmax(scale * q @ k^T + mask) @ v``, differentiable once.

    Args:
        q: ``[B, Hq, Sq, D]``, fp16 or bf16, any strides with unit stride on D.
        k: ``[B, Hkv, Skv, D]`` with ``Hq % Hkv == 0`` (GQA, MQA). Same dtype and device as q.
        v: ``[B, Hkv, Skv, Dv]``, same dtype and device as k. Dv need not be D. k and v may be views of one tensor.
        causal: Hide the keys after each query, aligned at the bottom right: query i sees key j when
            ``j <= i + Skv - Sq``.
        window: A pair (left, right) of ints from 0 on, or None. With ``d = Skv - Sq``, query i sees the keys from
            ``i + d - left`` to ``i + d + right``, both included. None in the pair leaves that side unbounded. `causal`
            bounds the right side, so ``window=(1023, None), causal=True`` is the last 1024 keys.
        scale: A finite number, which may be zero or negative. None is ``1/sqrt(D)``.
        softcap: A positive number: scores become ``softcap * tanh(score / softcap)``. It comes before ALiBi, bias and
            `score_mod`.
        alibi_slopes: fp32 ``[Hq]`` or ``[B, Hq]``: scores lose ``slope * |i + Skv - Sq - j|``.
        bias: ``[B|1, Hq|1, Sq|1, Skv|1]``, any strides. In the dtype of q or fp32 it is added to the scores; -inf hides
            a key. A bool one is a mask, as in scaled_dot_product_attention: true is visible, and what is false stays
            hidden whatever `score_mod` makes of it. A long one that has all queries and keys costs what a block mask
            does: blocks of 128 x 128 that it hides are left out. One that is broadcast costs an element for each key
            or query. `fmha_padded` leaves the padding of a batch out.
        score_mod: FlexAttention's ``(score, b, h, q_idx, kv_idx) -> score``, on 0-d tensors. It comes after the three
            above. It runs once, to give an expression (`multiattn.score`) that becomes code of each kernel's language.
        block_mask: FlexAttention's `BlockMask`. Blocks that it leaves out cost nothing. A key must pass this mask as
            well as `causal` and `window`.
        dropout_p: 0.0. NotImplementedError for another number, because no kernel here drops attention weights.
        dropout_seed: Ignored while nothing is dropped.
        sinks: ``[Hq]``, any floating-point dtype, differentiable. Each query head gets one more column, which has this
            natural-log logit, is not scaled, and has no value.
        backend: One of `backends()`, ``"reference"``, or ``"auto"``. On a GPU ``"auto"`` is the fastest by recorded
            measurements, first by those that ``multiattn tune`` made on this GPU; on CPU tensors it is the reference.
            A named backend runs or raises; nothing falls back. On CPU tensors a named backend runs its kernel source
            on the CPU, exactly and slowly. (Triton runs plain `triton.language` there, and Gluon only if its variant
            is named.) The gradient comes from the same backend; ``"auto"`` chooses the backward by its own
            measurements.
        variant: A variant of that backend's forward. None is its best one that can run the problem.
        return_lse: Also return the log-sum-exp.
        return_max: Also return the largest score of each row, last. ``.amax((0, 2))`` of it is what QK-clip (Kimi K2,
            arXiv 2507.20534, section 2.1) compares each head with.
        deterministic: Run only variants that give the same bits each time, at some cost in the backward. None follows
            `torch.use_deterministic_algorithms`.

    Returns:
        The output, ``[B, Hq, Sq, Dv]`` in the dtype of q; in memory it is ``[B, S, H, Dv]`` where q is. With
        `return_lse` also lse, fp32 ``[B, Hq, Sq]``: the natural log of the sum of exp of the final scores, sink
        included. A row that sees no key has ``out = 0`` and ``lse = -inf`` (with a sink: ``lse = sink``), and gives
        zero gradients. Both results are differentiable. With `return_max` also the largest of the final scores that
        each row sees, like lse and behind it, without a gradient. A sink is no score. Of no key it is -inf.

    Raises:
        TypeError, ValueError: An input is wrong for every backend.
        Unsupported: The backend cannot run this problem here; `.reasons` says why. Where an input requires grad, the
            backward is planned here too, and raises its own reasons here.
        NotImplementedError: A gradient is differentiated again. `multiattn.reference` can do that.

    The launch goes to the current stream of the tensors' device, without synchronising. Under `torch.compile`,
    `torch.export`, `torch.func`, dispatch modes and profilers it is the op ``torch.ops.multiattn.fmha_forward``. Under
    `torch.autocast` q, k and v are cast to its dtype, as scaled_dot_product_attention casts them. On the device
    ``meta`` nothing is launched or refused, and results have their shapes and strides.

    Source of the algorithm: Dao, "FlashAttention-2" (arXiv 2307.08691), Algorithms 1 and 2.
    """
    if unknown or extra or v is None:
        refuse_call(fmha, extra, unknown, q=q, k=k, v=v)
    options = Options.of(
        causal=causal,
        window=window,
        scale=scale,
        has_sinks=sinks is not None,
        dropout_p=dropout_p,
        backend=backend,
        variant=variant,
        deterministic=deterministic,
    )
    if compat.autocast_active():
        q, k, v = autocast(q, k, v)
    operands = Operands(q, k, v, sinks=sinks)
    if not (softcap is None and alibi_slopes is None and bias is None and score_mod is None and block_mask is None):
        operands, options = with_score(operands, options, softcap, alibi_slopes, bias, score_mod, block_mask)
    if return_max:
        out, lse, row_max = attend_with_max(operands, options)
        return (out, lse, row_max) if return_lse else (out, row_max)
    out, lse = attend(operands, options)
    return (out, lse) if return_lse else out


@takes(CallOptions)
def fmha_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    *extra: NoReturn,
    dlse: torch.Tensor | None = None,
    **options: Unpack[CallOptions],
) -> tuple[torch.Tensor, ...]:
    """The gradient of `fmha` from the results of a forward, for callers without autograd.

    Args:
        q, k, v, and all from causal to dropout_seed, deterministic: As in the call of `fmha`.
        out: The output of a forward of any backend, in the dtype and shape of q.
        lse: The log-sum-exp of the same forward, fp32 ``[B, Hq, Sq]``.
        dout: The gradient of out, like it.
        dlse: The gradient of lse, like it. None if nothing depends on lse.
        backend: As for `fmha`, whichever backend ran the forward. On a GPU ``"auto"`` follows recorded measurements of
            the backward, or of the forward where an arch has none of the backward yet.
        variant: A variant of that backend's backward. None is its best one that can run the problem.

    Returns:
        dq, dk and dv, in the dtypes and shapes of q, k and v; each is ``[B, S, H, D]`` in memory where its tensor is.
        dk and dv of a key/value head are summed, in fp32, over the query heads that share it. With sinks, dsinks
        follows. Then come the gradients of those of alibi_slopes, bias and the tensors that `score_mod` captures that
        require one, in this order.

    Raises:
        TypeError, ValueError, Unsupported: As for `fmha`.

    out, lse, dout and dlse may have any strides. The kernels read out and dout in the layout of `fmha`'s output, lse
    and dlse contiguous, all from addresses that are multiples of 16 bytes. A tensor in another layout, such as an
    expanded or transposed dout, costs a copy.
    """
    if extra or dout is None or not _NAMES.issuperset(options):
        refuse_call(fmha_backward, extra, options, q=q, k=k, v=v, out=out, lse=lse, dout=dout)
    if not isinstance(dout, torch.Tensor):
        raise not_a_tensor("dout", dout)
    with torch.enable_grad():  # who asks for a gradient is a matter of tensors here
        operands, asked = dense_call(Operands(q, k, v, out, lse, dout, dlse), options)
    gradients = differentiate(operands, asked)
    return tuple(it for it in gradients if it is not None)  # those of q, k, v and sinks are there, as dout is


@takes(ExplainOptions)
def explain(
    q: torch.Tensor | Problem,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *extra: NoReturn,
    **options: Unpack[ExplainOptions],
) -> Plan | tuple[Reason, ...]:
    """The Plan that `fmha` would launch for these arguments, or the reasons why it would refuse.

    With `cu_seqlens_kv` it explains `fmha_varlen`, and with `seqlens_kv` it explains `fmha_kvcache`. `Plan.describe`
    prints a Plan in lines. A problem without queries or without keys has a Plan like any other, but launches no kernel:
    there is nothing to do, or every row is empty.

    With a block mask, `Plan.blocks` says how many blocks are full, partial and skipped. To learn that it reads the
    lists: on a GPU it waits for the device.

    Args:
        q, k, v: As for `fmha`, or one `Problem` in place of all three, with `arch`. Tensors that require grad are
            refused where either direction is refused, as by `fmha`.
        all from causal to deterministic, return_max: As for `fmha`. A Problem has its own of those before backend.
        cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv: As for `fmha_varlen`, with its q, k and v.
        seqlens_kv, page_table, cu_seqlens_q, max_seqlen_q, num_splits, k_scale, v_scale: As for `fmha_kvcache`, with
            its q, and its k_cache and v_cache as k and v.
        arch: Explain for this arch (``"sm80"``) instead of the tensors' device. This consults only the data, not
            whether this machine has such a GPU.
        direction: ``"backward"`` gives the Plan of the gradient: from autograd if tensors require grad, else from
            `fmha_backward`. ``"auto"`` chooses each direction by its own measurements. A cache has no gradient.

    Raises:
        TypeError, ValueError, NotImplementedError: As the call that is explained.
    """
    if extra or q is None or not _EXPLAINED.issuperset(options):
        refuse_call(explain, extra, options, q=q)
    direction, arch, seqlens_kv = options.get("direction", "forward"), options.get("arch"), options.get("seqlens_kv")
    if direction not in DIRECTIONS:
        raise ValueError(f"direction: got {direction!r}; allowed {', '.join(DIRECTIONS)}")
    directions: tuple[Direction, ...] = (direction,)
    tuning: Tuning | None = None
    counts: BlockCounts | None = None
    given = {name: it for name, it in options.items() if it is not None}
    if seqlens_kv is None:
        _refuse_given(given, _CACHED_ALONE, "without seqlens_kv")
    elif direction != "forward":
        raise ValueError(f"direction: got {direction!r}; allowed forward with seqlens_kv: a cache has no gradient")
    if isinstance(q, Problem):
        asked, _ = settled(options)
        if arch is None:
            raise ValueError('explain(Problem) needs arch=, as no tensor tells it; got None; allowed "sm90", "H100"...')
        target = arch_by_name(arch)
        if k is not None or v is not None or asked.right is not None or given.keys() & _OF_PROBLEM:
            raise TypeError("explain(Problem) takes q alone, as the Problem has its own mask, scale, scores, sinks")
        problem = q
    elif k is None or v is None:
        if not isinstance(q, torch.Tensor):
            raise not_a_tensor("q", q, "a torch.Tensor or a multiattn.Problem")
        raise TypeError(f"explain needs q, k and v, or one Problem; got no {'k' if k is None else 'v'}; give it, too")
    else:
        if seqlens_kv is not None:
            _refuse_given(given, _NOT_CACHED, "with seqlens_kv: fmha_kvcache has no such argument")
            operands, asked = cached_call(q, k, v, options, Where.of(options))
            refuse_gradient(operands)
        elif given.keys() & Lengths._fields:
            operands, asked = packed_call(q, k, v, options, Lengths.of(options))
        else:
            operands, asked = dense_call(Operands(q, k, v), options)
        problem = problem_of(operands, asked._replace(row_max=True) if options.get("return_max") else asked)
        target = detect(q.device) if arch is None else arch_by_name(arch)
        tuning = tuning_for(q.device) if arch is None else None
        from_autograd = needs_grad(operands) and (direction == "forward" or asked.variant is None)
        directions = DIRECTIONS if from_autograd else directions
        if asked.blocks is not None and q.device.type != "meta" and not compat.dispatch_modes():
            counts = BlockCounts.of(operands.indices.named)
    try:
        plans = choose(problem, target, asked, *directions, probe=arch is None, tuning=tuning)
    except Unsupported as error:
        return error.reasons
    plan = plans[directions.index(direction)]
    return plan if counts is None else replace(plan, blocks=counts)


def _refuse_given(given: Mapping[str, object], names: Iterable[str], why: str) -> None:
    """TypeError for an argument of these names."""
    for name in names:
        if name in given:
            raise TypeError(f"{name}: got {type(given[name]).__name__}; allowed None {why}; leave it out")


def backends(device: torch.device | str | None = None) -> Mapping[str, tuple[Reason, ...]]:
    """Every backend, with the reasons why this machine cannot run it on `device`; none if it can.

    If `device` is None, it is the current GPU, or the CPU where there is no GPU.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: got {device}; allowed cpu and cuda; backends() asks for what is here")
    if device.type == "cuda" and (reasons := probe_gpu()):
        return dict.fromkeys(BACKENDS, reasons)
    target = detect(device)
    return {name: registry.get(name).probe(target) for name in BACKENDS}
