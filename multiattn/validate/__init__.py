"""The only validation of a call's arguments: TypeError or ValueError, naming what came and what is accepted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import torch

from multiattn.layout import DTYPE_NAMES, Shape, fits_broadcast
from multiattn.plain import plain

LOG2_E = math.log2(math.e)

SCALE_MAX = 3.4028234663852886e38 / LOG2_E
"""The largest whose product with `LOG2_E`, which kernels take, fp32 can hold."""

_MOVE = "move it by .to(q.device)"


def check_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None, *, strides: bool = True
) -> None:
    """TypeError or ValueError for tensors that are wrong for every backend; fake tensors are fine.

    Without `strides` those are not asked: a tensor that `torch.vmap` maps may be laid out anew before it runs.
    """
    _check_tensors(q, k, v)
    check_shapes(tuple(q.shape), tuple(k.shape), tuple(v.shape))
    if strides:
        _check_strides(q, k, v)
    if sinks is not None:
        check_sinks(sinks, q)


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    tensors = {"q": q, "k": k, "v": v}
    for name, tensor in tensors.items():
        check_operand(name, tensor)
    check_share("q, k and v", tensors)
    if q.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"device: got {q.device}; allowed cpu, cuda and meta; move q, k and v by .cuda() or .cpu()")


def check_operand(name: str, tensor: object, dtypes: Iterable[torch.dtype] = DTYPE_NAMES) -> torch.Tensor:
    """The tensor; TypeError or ValueError for what is no q, keys or values: not dense, negated, of another dtype."""
    check_dense(name, tensor)
    assert isinstance(tensor, torch.Tensor)
    if tensor.is_neg():
        raise ValueError(f"{name} must hold its own values; got a negated view; call .resolve_neg() on it")
    check_dtype(name, tensor, dtypes, "; call .bfloat16() on it")
    return tensor


def not_a_tensor(name: str, given: object, allowed: str = "a torch.Tensor") -> TypeError:
    """The error for what is no tensor, with the call that makes one of it."""
    kind = type(given)
    got = kind.__name__ if kind.__module__ in ("builtins", "torch") else f"{kind.__module__}.{kind.__name__}"
    if kind.__module__.partition(".")[0] == "numpy":
        hint = f"; torch.from_numpy({name}) makes one that shares its memory"
    elif hasattr(given, "__dlpack__"):
        hint = f"; torch.from_dlpack({name}) makes one that shares its memory"
    elif isinstance(given, (list, tuple)):
        hint = f"; torch.tensor({name}) makes one of numbers, torch.stack({name}) one of tensors"
    elif isinstance(given, Real):
        size = "(B,), {}, dtype=torch.int32" if "seqlens" in name else "size, {}"
        hint = f"; torch.full({size.format(name)}, device=q.device) makes one of a number"
    else:
        hint = "; give one"
    return TypeError(f"{name} must be {allowed}; got {got}{hint}")


def check_dense(name: str, tensor: object) -> None:
    """TypeError for what is no dense tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise not_a_tensor(name, tensor)
    if tensor.is_nested:
        hint = "fmha_varlen takes its values() and offsets(), fmha what torch.nested.to_padded_tensor gives"
        raise TypeError(f"{name} must be a dense strided tensor; got a nested tensor; {hint}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense strided tensor; got layout {tensor.layout}; call .to_dense() on it")


def check_dtype(name: str, tensor: torch.Tensor, allowed: Iterable[torch.dtype], hint: str = "") -> None:
    """TypeError for a tensor of another dtype."""
    if tensor.dtype not in allowed:
        raise TypeError(f"{name}.dtype: got {tensor.dtype}; allowed {', '.join(map(str, allowed))}{hint}")


def check_share(
    names: str, tensors: Mapping[str, torch.Tensor], otherwise: str = ", or call under torch.autocast"
) -> None:
    """TypeError or ValueError for tensors that have not all one dtype and one device."""
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    first = next(iter(tensors))
    if len(set(dtypes.values())) > 1:
        hint = f"convert the others by .to({first}.dtype){otherwise}"
        raise TypeError(f"{names} must share one dtype; got {_list(dtypes)}; {hint}")
    devices = {name: tensor.device for name, tensor in tensors.items()}
    if len(set(devices.values())) > 1:
        raise ValueError(f"{names} must be on one device; got {_list(devices)}; move the others by .to({first}.device)")


def check_shapes(q: Shape, k: Shape, v: Shape) -> None:
    """ValueError for shapes that are no q, k and v of one call."""
    shapes = _list({"q": q, "k": k, "v": v})
    for name, shape in (("q", q), ("k", k), ("v", v)):
        if len(shape) != 4:
            hint = _of_rank(name, len(shape))
            raise ValueError(f"{name} must have rank 4, [B, H, S, D]; got rank {len(shape)} ({shapes}){hint}")
        if min(shape) < 0:
            raise ValueError(f"sizes must not be negative; got {shapes}")
    batch, heads_q, _, head_dim = q
    if k[:3] != v[:3]:
        hint = _of_one_shape(k, v)
        raise ValueError(f"k and v must have one shape but for the last dimension; got {shapes}; {hint}")
    if k[0] != batch:
        hint = "expand the smaller one, as by k.expand(B, -1, -1, -1)"
        raise ValueError(f"q, k and v must share the batch size; got {shapes}; {hint}")
    if k[3] != head_dim:
        hint = "D comes last, so a transposed k is given as k.transpose(-2, -1)" if k[2] == head_dim else _PAD
        raise ValueError(f"q and k must share head_dim; got {shapes}; {hint}")
    heads_kv = k[1]
    if min(head_dim, v[3], heads_q, heads_kv) < 1:
        raise ValueError(f"heads and head_dim must be at least 1; got {shapes}; with no heads there is nothing to call")
    if heads_q % heads_kv:
        raise ValueError(
            f"query heads must be a multiple of key/value heads (GQA); got Hq={heads_q}, Hkv={heads_kv} ({shapes})"
            f"; {_of_heads(q, k)}"
        )


_PAD = "pad the narrower one with zeros on D, and give scale"


def _of_one_shape(k: Shape, v: Shape) -> str:
    """Advice on k and v that differ, by the first dimension that does."""
    ways = (
        "take both from one batch",
        "repeat the heads of the one that has fewer, as by .repeat_interleave(n, dim=1)",
        "cut both to the same keys",
    )
    return next(way for way, left, right in zip(ways, k, v, strict=False) if left != right)


def _of_rank(name: str, rank: int) -> str:
    """Advice on a tensor of another rank than 4."""
    if rank == 3:
        return f"; one head is {name}.unsqueeze(1), one sequence {name}.unsqueeze(0), packed rows go to fmha_varlen"
    return f"; reshape {name} so, as by {name}.unflatten(-1, (H, D)).transpose(1, 2) of [B, S, H * D]"


def _of_heads(q: Shape, k: Shape) -> str:
    """Advice on heads that do not divide: the third dimensions may be the heads, which are fewer than most lengths."""
    if k[2] and q[2] % k[2] == 0 and q[2] < q[1] and k[2] < k[1]:
        return "[B, S, H, D] is given as a view, q.transpose(1, 2), and so k and v"
    return "the heads come second, [B, H, S, D]: repeat or cut those of k and v"


def _check_strides(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.shape[3] > 1 and tensor.stride(3) != 1:
            raise ValueError(
                f"{name} must have unit stride on D; got strides {tuple(tensor.stride())} for shape "
                f"{tuple(tensor.shape)}; call .contiguous() on it"
            )


def check_sinks(sinks: torch.Tensor, q: torch.Tensor) -> None:
    """TypeError or ValueError for what is no sink for each head, the second dimension of q."""
    if not isinstance(sinks, torch.Tensor):
        raise not_a_tensor("sinks", sinks, "a torch.Tensor or None")
    if not sinks.is_floating_point() or sinks.layout != torch.strided:
        got = f"{sinks.dtype}, layout {sinks.layout}"
        raise TypeError(f"sinks must be a dense floating-point tensor; got {got}; call .float() on it")
    if sinks.shape != q.shape[1:2]:
        allowed = f"[{q.shape[1]}], one for each head of q"
        hint = "; call .flatten() on it" if sinks.numel() == q.shape[1] else "; one number for all is .expand(Hq)"
        raise ValueError(f"sinks: got shape {list(sinks.shape)}; allowed {allowed}{hint}")
    if sinks.device != q.device:
        raise ValueError(f"sinks must be on the device of q, {q.device}; got {sinks.device}; {_MOVE}")


def check_block_mask(block_mask: Any, shape: Shape, *, is_packed: bool = False, is_cached: bool = False) -> None:
    """TypeError for what is no FlexAttention's `BlockMask`; ValueError for one of other sizes than ``(B, H, Sq, Skv)``.

    `is_packed`: rows are those of a packed batch. `is_cached`: lengths are the keys that a cache has room for.
    """
    from torch.nn.attention.flex_attention import BlockMask  # imports SymPy

    if not isinstance(block_mask, BlockMask):
        allowed = "torch.nn.attention.flex_attention.BlockMask"
        hint = "make one by create_block_mask(mask_mod, B, H, Sq, Skv)"
        if isinstance(block_mask, torch.Tensor):
            hint = f"a mask tensor is bias, or {hint}"
        raise TypeError(f"block_mask must be a {allowed}; got {type(block_mask).__name__}; {hint}")
    size_q, size_kv = block_mask.BLOCK_SIZE
    batch, heads, rows, columns = block_mask.kv_indices.shape
    wanted = -(-shape[2] // size_q), -(-shape[3] // size_kv)
    is_broadcast = fits_broadcast((batch, heads), shape[:2])
    if not is_broadcast or rows < wanted[0] or columns < wanted[1]:
        each = [str(it) if it == 1 else f"1 or {it}" for it in shape[:2]] + [f"{it} or more" for it in wanted]
        hint = "make it by create_block_mask for these lengths"
        if is_packed:
            hint = "in a packed batch it is over the rows of all sequences together, of one batch entry"
        elif is_cached:
            hint = "over a cache both of its lengths are the keys that there is room for, as positions count them"
        elif columns < wanted[1]:
            hint = "lists have room for every block of keys, whatever their counts: pad them"
        letter = "T" if is_packed else "S"
        raise ValueError(
            f"block_mask: got lists {[batch, heads, rows, columns]} of blocks {size_q} x {size_kv}; allowed "
            f"[{', '.join(each)}] for {letter}q={shape[2]} and {letter}kv={shape[3]}; {hint}"
        )


def check_lists(lists: Mapping[str, torch.Tensor], q: torch.Tensor) -> None:
    """ValueError for lists of a block mask, by name, that are elsewhere than q, no integers, or not of one shape."""
    for name, tensor in lists.items():
        if tensor.dtype.is_floating_point or tensor.dtype in (torch.bool, torch.complex64, torch.complex128):
            raise ValueError(f"block_mask.{name}: got {tensor.dtype}; allowed int32, and other integers")
        if tensor.device != q.device:
            allowed = f"the device of q, {q.device}; move it by block_mask.to(q.device)"
            raise ValueError(f"block_mask.{name}: got a tensor on {tensor.device}; allowed {allowed}")
        partial = lists[name.removeprefix("full_")].shape
        if tensor.shape != partial:
            allowed = f"the shape of the lists of partial blocks, {list(partial)}"
            raise ValueError(f"block_mask.{name}: got {list(tensor.shape)}; allowed {allowed}")


def check_modification(
    q: torch.Tensor,
    lengths: tuple[int, int, int],
    softcap: float | None,
    alibi_slopes: torch.Tensor | None,
    bias: torch.Tensor | None,
    score_mod: object,
    *,
    last: int | None = None,
) -> None:
    """TypeError or ValueError for what modifies no scores of these lengths: (B, Sq, Skv).

    `last` is the number of last keys of a cache that a bias is of, if it is not of all.
    """
    check_softcap(softcap)
    (batch, seq_q, seq_kv), heads = lengths, q.shape[1]
    if alibi_slopes is not None:
        _check_captured("alibi_slopes", alibi_slopes, q, (torch.float32,))
        its = tuple(alibi_slopes.shape)
        if its != (heads,) and its != (batch, heads):
            allowed = f"({heads},) and ({batch}, {heads}); give one slope for each head of q, flat"
            raise ValueError(f"alibi_slopes: got shape {its}; allowed {allowed}")
    if bias is not None:
        _check_captured("bias", bias, q, (q.dtype, torch.float32, torch.bool))
        sizes = (batch, heads, seq_q, seq_kv if last is None else last)
        if bias.ndim != 4 or not fits_broadcast(bias.shape, sizes):
            allowed = f"[B|1, Hq|1, Sq|1, Skv|1] with {sizes}"
            raise ValueError(f"bias: got shape {tuple(bias.shape)}; allowed {allowed}{_with_four(bias, sizes)}")
    if score_mod is not None and not callable(score_mod):
        hint = "a tensor to add to scores is bias" if isinstance(score_mod, torch.Tensor) else "(s, b, h, i, j) -> s"
        raise TypeError(f"score_mod must be callable or None; got {type(score_mod).__name__}; {hint}")


def check_softcap(softcap: float | None) -> None:
    """TypeError or ValueError for what no score is capped by; None is no cap."""
    if softcap is None:
        return
    cap = as_float(softcap, "softcap")
    if not 0.0 < cap < math.inf:
        raise ValueError(f"softcap: got {cap}; allowed positive and finite numbers, or None, which caps nothing")


def _with_four(bias: torch.Tensor, sizes: tuple[int, int, int, int]) -> str:
    """How a bias of fewer dimensions gets four, where its shape tells."""
    batch, _, seq_q, seq_kv = sizes
    if bias.ndim == 2 and tuple(bias.shape) == (batch, seq_kv) != (seq_q, seq_kv):
        return "; bias[:, None, None, :] is one of each key, and fmha_padded takes [B, Skv] as it is"
    ways = {2: "bias[None, None] is [Sq, Skv] of all heads", 3: "bias[:, None] is [B, Sq, Skv] of all heads"}
    if bias.ndim != 4:
        return f"; {ways.get(bias.ndim, 'give it four dimensions, of size 1 where all are alike')}"
    at = next(at for at, size in enumerate(sizes) if bias.shape[at] not in (1, size))
    if at == 1 and bias.shape[1] and sizes[1] % bias.shape[1] == 0:
        group = sizes[1] // bias.shape[1]
        return f"; bias.repeat_interleave({group}, dim=1) gives each query head that of its key/value head"
    return f"; dimension {at} is {bias.shape[at]}: make it {sizes[at]}, as by cutting or padding, or 1 for all alike"


def _check_captured(name: str, tensor: object, q: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise not_a_tensor(name, tensor, "a torch.Tensor or None")
    if tensor.dtype not in dtypes or tensor.layout != torch.strided:
        allowed = " or ".join(map(str, dict.fromkeys(dtypes)))
        is_mask = torch.bool in dtypes and not (tensor.is_floating_point() or tensor.is_complex())
        hint = "call .bool() on a mask, .float() on numbers to add" if is_mask else "call .float() on it"
        raise TypeError(f"{name}: got {tensor.dtype}, layout {tensor.layout}; allowed dense {allowed}; {hint}")
    if tensor.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}; got {tensor.device}; {_MOVE}")


def check_scale(scale: float | None, head_dim: int) -> float:
    """The scale as a float, None its default; TypeError or ValueError for what fp32 has no finite number for."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    number = as_float(scale)
    if not abs(number) <= SCALE_MAX:
        allowed = f"up to {SCALE_MAX:.4g} (zero and negative are fine)"
        raise ValueError(f"scale must be finite, {allowed}; got {number}; None is 1/sqrt(D)")
    return number


_WITHOUT_DROPOUT = (
    "Give 0.0 while evaluating, set the model's dropout of attention to 0 to train with it, or train with "
    "torch.nn.functional.scaled_dot_product_attention"
)


def refuse_dropout(dropout_p: object, name: str = "dropout_p", hint: str = _WITHOUT_DROPOUT) -> None:
    """NotImplementedError for a `dropout_p` that drops something; TypeError for one that is no number."""
    number = plain(dropout_p)
    if isinstance(number, bool) or not isinstance(number, Real):
        got = f"{type(dropout_p).__name__}; leave it out or give 0.0, which drops nothing"
        raise TypeError(f"{name} must be a float; got {got}")
    if number != 0:
        raise NotImplementedError(f"{name}: got {number}; allowed 0.0: no kernel here drops attention weights. {hint}")


def as_float(scale: Any, name: str = "scale") -> float:
    """A number as a float, infinite beyond every float; TypeError for what is none. A traced one stays what it is."""
    if isinstance(scale, (torch.SymFloat, torch.SymInt)) or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return scale  # type: ignore[no-any-return]  # stands for a float until the graph runs
    scale = plain(scale)
    if isinstance(scale, bool) or not isinstance(scale, Real):
        got, hint = type(scale).__name__, "leave it out for the default, or give one number"
        if isinstance(scale, torch.Tensor) and scale.numel() == 1:
            hint = f"{name}.item() is one, and waits for the device"
        elif isinstance(scale, torch.Tensor):
            got = f"{got} of shape {tuple(scale.shape)}"
            hint = "it is one number for all: multiply q by a tensor, or do it in score_mod"
        raise TypeError(f"{name} must be a float or None; got {got}; {hint}")
    try:
        return float(scale)
    except OverflowError:  # an int or a fraction beyond every float
        return math.inf


def _list(named: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in named.items())
