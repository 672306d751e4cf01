"""Parts that the commands of ``python -m multiattn`` share: argparse's types, a problem's options, and tables."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tabulate import tabulate

from multiattn.block_mask import LISTS, BlockCounts, BlockLists, BlockSpec, of_sequences
from multiattn.blocks import block_mask
from multiattn.kvcache import Where, cached_call
from multiattn.layout import DTYPES
from multiattn.mask import MASKS, Band, Window, band_of, parse_band
from multiattn.operands import Operands
from multiattn.plan.arch import ARCHS, GPU_ARCHS, by_name, detect
from multiattn.plan.backend import BACKENDS, DIRECTIONS, Direction
from multiattn.problem import Problem
from multiattn.problem import problem_of as problem_of_call
from multiattn.signatures import dense_call
from multiattn.varlen import Lengths, packed_call

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

TOKENS, HIDDEN = 16384, 2048
"""Batch times length, and heads times head_dim, where the options say nothing else; those of every cell of
`python -m bench --suite standard`: the work of a layer stays, its shape changes."""


class HeadDims(NamedTuple):
    """The head_dim of q and k, and that of v."""

    head_dim: int
    head_dim_v: int

    def __str__(self) -> str:
        return one_or_both(*self)


class Shape(NamedTuple):
    """The sizes of ``--shape``; None for those of k and v that are those of q, and of v that are those of k."""

    batch: int
    heads: int
    seq: int
    head_dim: int
    heads_kv: int | None = None
    seq_kv: int | None = None
    head_dim_v: int | None = None


def shape(text: str) -> Shape:
    """``2,16,1024,128``, ``2x16x1024x128`` or ``2,16/4,1/1024,192/128``: batch; heads, length and head_dim of q.

    After a slash come the heads and the length of k and v, and the head_dim of v.
    """
    parts = [part.strip().split("/") for part in text.replace("x", ",").split(",")]
    is_whole = all(it.strip().isdecimal() for part in parts for it in part)
    if not is_whole or [len(part) for part in parts] not in _SIZES:
        allowed = "B,H,S,D or B,H/Hkv,S/Skv,D/Dv, as in 2,16,1024,128 and 2,16/4,1/1024,192/128"
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed {allowed}")
    (batch,), *pairs = ([int(it) for it in part] for part in parts)
    return Shape(batch, *(first for first, *_ in pairs), *(next(iter(rest), None) for _, *rest in pairs))


_SIZES = [[1, *each] for each in itertools.product((1, 2), repeat=3)]


def count(text: str) -> int:
    """A whole number from 1 on."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}; allowed whole numbers from 1 on")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    """Some counts with commas between them, each once."""
    return tuple(dict.fromkeys(map(count, text.split(","))))


def head_dims(text: str) -> tuple[HeadDims, ...]:
    """``64,192/128``: head_dims of q and k, and of v behind a slash where it is another; each once."""
    pairs = ([count(it) for it in part.split("/", 1)] for part in text.split(","))
    return tuple(dict.fromkeys(HeadDims(pair[0], pair[-1]) for pair in pairs))


def some_of(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Some of `allowed` with commas between them, each once."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
        wrong = [name for name in names if name not in allowed]
        if wrong:
            raise argparse.ArgumentTypeError(f"got {', '.join(map(repr, wrong))}; allowed {', '.join(allowed)}")
        return names

    return parse


class Command(argparse.ArgumentParser):
    """The parser of one command. For a word that it does not know it shows its own usage, not that of all commands."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As its parent's, but no word is left."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"got {' '.join(unknown)}; allowed the options above; {self.prog} --help explains them")
        return found, unknown


def window(text: str) -> Window:
    """``1024:0``: keys before and after its own that a query sees, with ``-`` for all of them."""
    try:
        band = parse_band(f"window:{text}")
    except ValueError:
        n = text if text.isdecimal() else "N"
        hint = f"the last {n} keys up to the query's own are {int(n) - 1 if n.isdecimal() else 'N-1'}:0"
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed LEFT:RIGHT, - for all of a side; {hint}") from None
    return band.left, band.right


def masks(text: str) -> tuple[str, ...]:
    """Some of ``full``, ``causal`` and ``window:1024:0`` with commas between them, each once."""
    try:
        return tuple(dict.fromkeys(str(parse_band(name)) for name in text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def arch_name(text: str) -> str:
    """The name of the arch that is called so, or of the GPU's."""
    try:
        return by_name(text).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("arch: ")) from None


def gpu_arches(text: str) -> tuple[str, ...]:
    """Some arches of GPUs with commas between them, each once."""
    return some_of(GPU_ARCHS)(",".join(map(arch_name, text.split(","))))


def block(text: str) -> tuple[int, int]:
    """``128`` or ``128x64``: queries and keys of a block."""
    queries, _, keys = text.partition("x")
    return count(queries), count(keys or queries)


def add_problem(command: argparse.ArgumentParser, *, required: bool, several: bool = False) -> None:
    """Add the options that say what is attended to, alike in every command; with `several` shapes it is a list.

    `problem_of` and `with_features` read them.
    """
    again, told = ("append", "; may be given again") if several else ("store", "")
    add = command.add_argument_group("the problem").add_argument
    sizes = "B,H[/Hkv],S[/Skv],D[/Dv]"
    add("--shape", type=shape, action=again, required=required, metavar=sizes, help=f"of q, and of k and v{told}")
    add("--kv-heads", type=count, metavar="H", help="heads of k and v (default: those of q)")
    add("--kv-len", type=int, metavar="S", help="sequence length of k and v (default: that of q)")
    add("--dtype", choices=tuple(DTYPES), default="bf16", help="default: %(default)s")
    add("--causal", action="store_true", help="bottom-right aligned")
    add("--window", type=window, metavar="LEFT:RIGHT", help="keys before and after; - for all")
    add("--scale", type=float, help="of the scores (default: 1/sqrt(D))")
    add("--softcap", type=float, metavar="C", help="scores become C*tanh(score/C)")
    add("--alibi", action="store_true", help="a slope for each head")
    add("--bias", action="store_true", help="a bias [1, Hq, Sq, Skv] in the dtype of q")
    add("--sinks", action="store_true", help="a sink for each head")
    add("--block", type=block, metavar="N[xM]", help="a block mask, of blocks of N queries and M keys")
    add("--packed", action="store_true", help="B sequences of S tokens, one after another (fmha_varlen)")
    told = "keys in a cache, of pages of PAGE keys if that is given (fmha_kvcache)"
    add("--cache", type=count, nargs="?", const=0, metavar="PAGE", help=told)
    add("--latent", action="store_true", help="v is the first columns of k, as in absorbed latent attention (MLA)")


def add_backends(command: argparse.ArgumentParser, default: str = "all") -> None:
    """Add the option that chooses backends, alike in every command that takes several: ``options.backend``."""
    told = f"of {', '.join(BACKENDS)}; may be given again; default: {default}"
    command.add_argument("--backend", action="extend", type=some_of(BACKENDS), metavar="A,B,...", help=told)


def directions_of(options: argparse.Namespace) -> Sequence[Direction]:
    """The directions of ``--direction``; of a cache, which has no gradient, forward alone, or ValueError."""
    if options.cache is not None and options.direction == "backward":
        raise ValueError("--direction: got backward with --cache; allowed forward: a cache has no gradient")
    if options.direction == "both":
        return DIRECTIONS if options.cache is None else DIRECTIONS[:1]
    return (options.direction,)


def masks_of(options: argparse.Namespace) -> Sequence[str | Band]:
    """The masks of a sweep: that of ``--causal`` and ``--window``, those of ``--mask``, or full and causal."""
    if not options.causal and options.window is None:
        return options.mask or MASKS
    if options.mask:
        raise ValueError("--mask: got it with --causal or --window; allowed one or the other")
    return [band_of(options.causal, options.window)]


_FEATURES = ("softcap", "alibi", "bias", "sinks", "block", "packed", "cache", "latent")


def features_of(options: argparse.Namespace) -> list[str]:
    """The options that ask for more than plain attention of a batch."""
    return [f"--{name}" for name in _FEATURES if getattr(options, name) not in (None, False)]


def check_features(options: argparse.Namespace, *taken: str, why: str) -> None:
    """ValueError for a feature that a command does not take, and what to do."""
    wrong = [name for name in features_of(options) if name not in taken]
    if wrong:
        raise ValueError(f"{wrong[0]}: got it; allowed {', '.join(taken) or 'plain problems'}: {why}")


def sizes_given(options: argparse.Namespace) -> dict[str, int | None]:
    """Heads and length of k and v, said by the shape or by options of their own; ValueError where both say it."""
    given: Shape | None = options.shape
    sizes: dict[str, int | None] = {"heads_kv": options.kv_heads, "seq_kv": options.kv_len}
    for name, flag in (("heads_kv", "--kv-heads"), ("seq_kv", "--kv-len")):
        if given is not None and getattr(given, name) is not None:
            if sizes[name] is not None:
                raise ValueError(f"{flag}: got {sizes[name]} with a shape that has its own; allowed one of the two")
            sizes[name] = getattr(given, name)
    return sizes


def problem_of(options: argparse.Namespace) -> Problem:
    """The contiguous problem that the options ask for, without features; ValueError for sizes that do not fit."""
    batch, heads, seq, head_dim, *_, head_dim_v = options.shape
    band = band_of(options.causal, options.window)
    sizes = {"batch": batch, "heads": heads, "head_dim_v": head_dim_v, **sizes_given(options)}
    return layer(head_dim, seq, band, dtype=options.dtype, scale=options.scale, **sizes)


def called_problem(options: argparse.Namespace) -> Problem:
    """The problem as calls have it: with features, and without bounds of the mask that hide no key."""
    problem = problem_of(options)
    plain = replace(problem, band=problem.band.within(problem.seq_q, problem.seq_kv))
    return plain if not features_of(options) else with_features(problem, options)


def with_features(plain: Problem, options: argparse.Namespace) -> Problem:
    """The problem of a call like a plain one, with what the options ask for, of tensors that have no memory.

    The calls themselves make it. ValueError for features that no call has together.
    """
    if not features_of(options):
        return plain
    found = _called(plain, options)
    if not options.latent:
        return found
    if plain.head_dim_v > plain.head_dim:
        raise ValueError(f"--latent: got {plain.widths}; allowed values of up to {plain.head_dim} columns")
    return replace(found, v_in_k=True, strides_v=found.strides_k)


def _called(plain: Problem, options: argparse.Namespace) -> Problem:
    """`with_features`, with values apart from keys."""
    sizes = (plain.heads_q, plain.seq_q), (plain.heads_kv, plain.seq_kv)
    q, k = (_empty(plain, plain.batch, heads, seq, plain.head_dim) for heads, seq in sizes)
    v = _empty(plain, *k.shape[:-1], plain.head_dim_v)
    given = {"window": plain.band.window, "scale": plain.scale, "softcap": options.softcap}
    given["sinks"] = torch.empty(plain.heads_q, device="meta") if options.sinks else None
    if options.cache is not None:
        check_features(options, "--cache", "--latent", "--softcap", "--sinks", why="fmha_kvcache has no others")
        return _cached(plain, options.cache, Operands(q, k, v), given)
    given["alibi_slopes"] = torch.empty(plain.heads_q, device="meta") if options.alibi else None
    given["bias"] = _empty(plain, 1, plain.heads_q, plain.seq_q, plain.seq_kv) if options.bias else None
    if options.packed:
        starts = torch.empty(plain.batch + 1, dtype=torch.int32, device="meta")
        q, k, v = (_empty(plain, it.shape[0] * it.shape[2], it.shape[1], it.shape[3]) for it in (q, k, v))
        given["block_mask"] = None if options.block is None else _block_mask(q.shape[0], k.shape[0], *options.block)
        return problem_of_call(*packed_call(q, k, v, given, Lengths(starts, starts, plain.seq_q, plain.seq_kv)))
    given["block_mask"] = None if options.block is None else _block_mask(plain.seq_q, plain.seq_kv, *options.block)
    return problem_of_call(*dense_call(Operands(q, k, v), given))


def _empty(plain: Problem, *sizes: int) -> torch.Tensor:
    return torch.empty(sizes, dtype=plain.torch_dtype, device="meta")


def _cached(plain: Problem, size: int, operands: Operands, given: dict[str, Any]) -> Problem:
    """The problem of `fmha_kvcache` with pages of a `size` that are just enough; without any for size 0."""
    if size:
        pages = -(-plain.seq_kv // size)
        given["page_table"] = torch.empty(plain.batch, pages, dtype=torch.int32, device="meta")
        rows = (plain.batch * pages, plain.heads_kv, size)
        k, v = (_empty(plain, *rows, width) for width in (plain.head_dim, plain.head_dim_v))
        operands = operands._replace(k=k, v=v)
    given["seqlens_kv"] = torch.empty(plain.batch, dtype=torch.int32, device="meta")
    return problem_of_call(*cached_call(*operands.qkv, given, Where.of(given)))


def _block_mask(seq_q: int, seq_kv: int, queries: int, keys: int) -> BlockMask:
    """A block mask of some such blocks, partial and full, for all heads, of so many queries and keys."""
    from torch.nn.attention.flex_attention import BlockMask  # imports SymPy

    rows, columns = -(-seq_q // queries), -(-seq_kv // keys)
    counts = torch.empty(1, 1, rows, dtype=torch.int32, device="meta")
    indices = torch.empty(1, 1, rows, columns, dtype=torch.int32, device="meta")
    lists = (counts, indices) * 2
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=(queries, keys), mask_mod=_see)


def _see(b: Any, h: Any, i: Any, j: Any) -> Any:
    """The mask of ``--block``."""
    return i >= j


def counts_of_blocks(problem: Problem) -> BlockCounts:
    """How many blocks the mask of ``--block`` has of each kind; of packed sequences, which are as long, theirs."""
    assert problem.blocks is not None
    lengths, sizes = (problem.seq_q, problem.seq_kv), (problem.blocks.queries, problem.blocks.keys)
    mask = block_mask(_see, None, None, *lengths, device="cpu", block_size=sizes)
    lists = BlockLists.among({name: getattr(mask, name) for name in LISTS}, BlockSpec(*sizes, has_full=True))
    if problem.packing is not None:
        each = torch.arange(problem.packing.sequences + 1, dtype=torch.int32)
        lists = of_sequences(lists, [each * (length // problem.packing.sequences) for length in lengths])
    return BlockCounts.of(lists.named)


def arguments_of(problem: Problem) -> list[str]:
    """The options that make `problem_of` give this contiguous problem."""
    q = f"{problem.batch},{problem.heads_q},{problem.seq_q},{HeadDims(problem.head_dim, problem.head_dim_v)}"
    sizes = ["--shape", q, "--kv-heads", str(problem.heads_kv), "--kv-len", str(problem.seq_kv)]
    flags = {"full": [], "causal": ["--causal"], "two_sided": [f"--{problem.mask.replace(':', '=', 1)}"]}
    mask = flags[problem.band.kind]
    return [*sizes, "--dtype", problem.dtype, f"--scale={problem.scale!r}", *mask]


def layer(
    head_dim: int, seq: int, mask: str | Band, *, batch: int | None = None, heads: int | None = None, **sizes: Any
) -> Problem:
    """Attention over `TOKENS` tokens with `HIDDEN` channels, where batch and heads are not given.

    `sizes` are more of `Problem.contiguous`. ValueError for sizes that do not go together.
    """
    return Problem.contiguous(
        batch=TOKENS // seq if batch is None else batch,
        heads_q=max(1, HIDDEN // head_dim) if heads is None else heads,
        seq_q=seq,
        head_dim=head_dim,
        band=mask if isinstance(mask, Band) else parse_band(mask),
        **sizes,
    )


def sizes_of(problem: Problem) -> tuple[str, str, str]:
    """Heads, lengths and head_dims: ``16``, ``4096`` and ``128``, or two where they differ: ``16/4``, ``192/128``."""
    heads, lengths = (problem.heads_q, problem.heads_kv), (problem.seq_q, problem.seq_kv)
    return one_or_both(*heads), one_or_both(*lengths), str(HeadDims(problem.head_dim, problem.head_dim_v))


def one_or_both(one: int, other: int) -> str:
    """``16``, or ``16/4`` of two that differ."""
    return "/".join(map(str, dict.fromkeys((one, other))))


def check_work(problem: Problem) -> None:
    """ValueError for a problem that no kernel is launched for."""
    if problem.is_empty or problem.seq_kv == 0:
        raise ValueError(f"shape: got {problem}; allowed one that needs a kernel")


def default_arch() -> str:
    """The name of this machine's arch; of sm90 where there is no GPU that kernels are for."""
    here = detect(torch.device("cuda")).name if torch.cuda.is_available() else "cpu"
    return here if here in ARCHS and here != "cpu" else "sm90"


def table(rows: Iterable[Sequence[Any]], headers: Sequence[str]) -> str:
    """Rows as a table for a terminal."""
    return tabulate(rows, headers=headers, disable_numparse=True)
