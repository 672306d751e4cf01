"""`Attention`: multi-head attention as a layer, around `multiattn.fmha`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from multiattn.api import fmha
from multiattn.mask import band_of
from multiattn.meant import refuse_call, refuses_calls
from multiattn.plain import plain
from multiattn.plan.backend import get as get_backend
from multiattn.signatures import LayerOptions, names_of, takes
from multiattn.validate import check_scale, check_softcap, not_a_tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack

_NAMES = names_of(LayerOptions)


class Attention(nn.Module):
    """Attention of a sequence to itself, or to another sequence, between linear projections.

    Args:
        embed_dim: The width of the inputs and outputs.
        num_heads: The number of query heads.
        num_kv_heads: The number of key/value heads, a divisor of `num_heads` (GQA, MQA). None is `num_heads`.
        head_dim: The width of a head. None is ``embed_dim / num_heads``.
        bias: Give the projections a bias. (That of scores is an argument of `forward`.)
        causal, window, scale, softcap, backend: As for `multiattn.fmha`.
        sinks: Learn a sink for each head, at first 0.
        device, dtype: Of the parameters. On a GPU the dtype is fp16 or bf16, or fp32 under `torch.autocast`.

    Raises:
        TypeError, ValueError: A size or an option is wrong, or the heads do not divide.

    The parameters have the names of most models: ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj`` and ``sinks``. With
    `torch.distributed.tensor.parallel` the first three may be column-parallel and the fourth row-parallel, so that each
    rank has its heads. Sinks stay whole.
    """

    @takes(LayerOptions)
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *extra: NoReturn,
        bias: bool = False,
        sinks: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        if extra or num_heads is None or not _NAMES.issuperset(options):
            refuse_call(Attention.__init__, extra, options, embed_dim=embed_dim, num_heads=num_heads)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        for name, size in sizes.items():
            _check_size(name, size)
        if num_heads % num_kv_heads:
            hint = "num_kv_heads=None gives each head its own"
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads; got {num_heads} and {num_kv_heads}; {hint}"
            )
        if head_dim is None and embed_dim % num_heads:
            got = f"{embed_dim}, {num_heads}; give head_dim"
            raise ValueError(f"embed_dim must be a multiple of num_heads without head_dim; got {got}")
        self.causal, self.window = options.get("causal", False), options.get("window")
        self.scale, self.softcap = options.get("scale"), options.get("softcap")
        self.backend = options.get("backend", "auto")
        band_of(self.causal, self.window)  # refuses here, as the three below, what a call would
        check_scale(self.scale, 1)
        check_softcap(self.softcap)
        if self.backend != "auto":
            get_backend(self.backend)
        self.embed_dim = embed_dim
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, num_heads * self.head_dim, bias, **made)
        self.k_proj = nn.Linear(embed_dim, num_kv_heads * self.head_dim, bias, **made)
        self.v_proj = nn.Linear(embed_dim, num_kv_heads * self.head_dim, bias, **made)
        self.o_proj = nn.Linear(num_heads * self.head_dim, embed_dim, bias, **made)
        self.sinks = nn.Parameter(torch.zeros(num_heads, **made)) if sinks else None

    @refuses_calls
    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor | None = None,
        *extra: NoReturn,
        bias: torch.Tensor | None = None,
        **unknown: NoReturn,
    ) -> torch.Tensor:
        """Attention of x to context, or to itself.

        Args:
            x: ``[B, Sq, embed_dim]``.
            context: ``[B, Skv, embed_dim]``, from which keys and values are made. None is x.
            bias: The `bias` of `multiattn.fmha`, a mask or numbers: ``[B|1, num_heads|1, Sq|1, Skv|1]``. A mask of
                tokens ``[B, Skv]`` is ``mask[:, None, None]``.

        Returns:
            ``[B, Sq, embed_dim]``. Only the projections copy anything, and heads stay where these put them.
        """
        if unknown or extra or x is None:
            refuse_call(Attention.forward, extra, unknown, x=x)
        context = x if context is None else context
        for name, tensor in (("x", x), ("context", context)):
            if not isinstance(tensor, torch.Tensor):
                raise not_a_tensor(name, tensor)
            if tensor.ndim != 3 or tensor.shape[2] != self.embed_dim:
                is_one = tuple(tensor.shape[1:]) == (self.embed_dim,)
                hint = f"one sequence is {name}.unsqueeze(0)" if is_one else "a linear layer before changes the width"
                got = f"shape {tuple(tensor.shape)}; {hint}"
                raise ValueError(f"{name} must be [B, S, {self.embed_dim}], with embed_dim last; got {got}")
        out = fmha(
            self._heads(self.q_proj(x)),
            self._heads(self.k_proj(context)),
            self._heads(self.v_proj(context)),
            causal=self.causal,
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
            bias=bias,
            sinks=self.sinks,
            backend=self.backend,
        )
        projected: torch.Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        """``[B, S, H * D]`` as ``[B, H, S, D]``, a view."""
        heads: torch.Tensor = projected.unflatten(2, (-1, self.head_dim))
        return heads.transpose(1, 2)

    def extra_repr(self) -> str:
        """The options of the call that are not at their defaults."""
        named = ("causal", "window", "scale", "softcap", "backend")
        return ", ".join(
            f"{it}={getattr(self, it)!r}" for it in named if getattr(self, it) not in (None, False, "auto")
        )


def _check_size(name: str, size: object) -> None:
    """TypeError or ValueError for what is no size of a layer; None is one that the others give."""
    size = plain(size)
    if size is None:
        return
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"{name} must be an int; got {type(size).__name__}; int({name}) makes one")
    if size < 1:
        raise ValueError(f"{name}: got {size}; allowed 1 and more; give the model's own")
