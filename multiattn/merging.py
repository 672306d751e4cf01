"""`merge` and `merge_all` combine attention over parts of the keys into attention over all of them.

They are plain PyTorch, and so differentiable any number of times. `torch.compile` makes one kernel of them, which reads
the output of each part once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from multiattn.meant import refuse_call, refuses_calls
from multiattn.validate.results import check_parts


@refuses_calls
def merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two sets of keys, from attention over each.

    The result is ``lse = log(exp(lse_a) + exp(lse_b))`` and
    ``out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b``, in fp32, or in fp64 where an argument is. No
    exponential overflows, and the weights of a row add up to 1.

    Args:
        out_a: ``[B, Hq, Sq, Dv]``, as from `multiattn.fmha`, or ``[T, Hq, Dv]``, as from `multiattn.fmha_varlen`. fp16,
            bf16, fp32 or fp64, any strides.
        lse_a: ``[B, Hq, Sq]``, or ``[Hq, T]`` of a packed batch: the natural log of the sum of exp of scores. fp32 or
            fp64, on the device of out_a.
        out_b: Same shape, dtype and device as out_a.
        lse_b: Same shape, dtype and device as lse_a.

    Returns:
        The output, with the dtype, shape and order in memory of out_a, and lse, with the dtype and shape of lse_a.
        Except for rounding they are the results of one call with all keys. Both are differentiable, any number of
        times.

    Raises:
        TypeError, ValueError: The arguments are not results of one attention; the message says what came.

    The order of parts is free. Each key belongs in one of them, under the mask and at the position that it has in the
    whole. For example, where a shared prefix comes before suffixes, queries see all of the prefix, and `causal` is for
    the suffix alone. Sinks count once: give them to one of the parts.

    A row of a part with ``lse = -inf`` counts for nothing, even if its out is NaN. It gets zero gradients, even from a
    NaN gradient. Rows that are so in both parts have ``out = 0`` and ``lse = -inf``. NaN anywhere else stays NaN.
    ``lse = +inf`` cannot come from finite scores, and gives ``out = NaN`` and ``lse = +inf``. FlashAttention 2 returns
    it for a row that sees no key: make it -inf first.

    Sources of the formula: Ye et al., "FlashInfer" (arXiv 2501.01005), section 2.2, and "Cascade Inference"
    (https://flashinfer.ai/2024/02/02/cascade-inference.html).
    """
    if lse_b is None:
        refuse_call(merge, (), {}, out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    return merge_named({"out_a": out_a, "out_b": out_b}, {"lse_a": lse_a, "lse_b": lse_b})


def merge_all(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge` of one part or more. It rounds to the dtype of outs once, where merging pairs would round each time.

    Args:
        outs: A list or tuple with the output of each part, all of one shape, as for `merge`.
        lses: A list or tuple with the lse of each part, in the same order.

    Returns:
        The output and lse, as from `merge`.

    Raises:
        TypeError, ValueError: As `merge`, and for lists that are empty or of different lengths.
    """
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, (list, tuple)):
            hint = f"{name}.unbind() makes one of a stack" if isinstance(parts, torch.Tensor) else f"give [*{name}]"
            raise TypeError(f"{name} must be a list or tuple of tensors; got {type(parts).__name__}; {hint}")
    return merge_named(
        {f"outs[{at}]": it for at, it in enumerate(outs)}, {f"lses[{at}]": it for at, it in enumerate(lses)}
    )


def merge_named(
    named_outs: Mapping[str, torch.Tensor], named_lses: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_all` of parts by the names that messages give to their tensors."""
    check_parts(named_outs, named_lses)
    outs, lses = list(named_outs.values()), torch.stack(list(named_lses.values()))  # [N, B, Hq, Sq] or [N, Hq, T]
    compute_dtype = torch.promote_types(torch.promote_types(outs[0].dtype, lses.dtype), torch.float32)

    # Filled places get no gradient: it would be NaN by inf - inf in an empty row, and by 0 * NaN where NaN comes in.
    unseen = lses == -torch.inf
    sees_none = unseen.all(dim=0)
    known = lses.masked_fill(unseen, -torch.inf).masked_fill(sees_none, 0.0)
    lse = torch.logsumexp(known, dim=0).masked_fill(sees_none, -torch.inf)
    weights = torch.softmax(known, dim=0, dtype=compute_dtype)

    # The parts of out are read one by one, and never stacked.
    weights, unseen = (_beside(it, outs[0]) for it in (weights, unseen))
    out = torch.where(unseen[0], 0.0, outs[0]) * weights[0]
    for at in range(1, len(outs)):
        out = torch.addcmul(out, torch.where(unseen[at], 0.0, outs[at]), weights[at])
    return out.to(outs[0].dtype), lse


def _beside(of_rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Numbers ``[N, B, Hq, Sq]`` or ``[N, Hq, T]`` as they broadcast to out, one more dimension in front.

    They lie in memory in the order of out: results are laid out like the first operand, and so like out.
    """
    is_packed = out.ndim == 3
    if is_packed or out.stride(1) < out.stride(2):  # [B, Sq, Hq, D] in memory
        of_rows = of_rows.transpose(-2, -1).contiguous()
        of_rows = of_rows if is_packed else of_rows.transpose(-2, -1)
    return of_rows.unsqueeze(-1)
