"""Attention of one long sequence over 8 to 1,024 GPUs, on paper: all of it is predicted, and nothing measured there.

What was measured is the speed of one GPU: TFLOPS of the fastest of our backends at each length, from bench/results.
Links are at a share of the bandwidth that their maker states. Three ways to divide a causal sequence of N tokens over P
ranks are compared:

- *ring* (Liu et al., "Ring Attention with Blockwise Transformers", arXiv 2310.01889): a rank keeps its queries, while
  keys and values go around, in P steps. Of 2P pieces of the sequence, rank r has the pieces r and 2P-1-r ("The Llama 3
  Herd of Models", arXiv 2407.21783, section 3.3.2), so that in each step every rank sees half of the pairs of its
  queries with the keys that are there.
- *heads* (Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509): before and after attention ranks exchange tokens for
  heads, so that each has all tokens of Hq / P heads. There are at most Hq ranks.
- *both* (Fang and Zhao, "USP", arXiv 2405.07719): heads within a node of 8 GPUs, a ring of nodes across.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.matrix import Cell, Direction, InputError
from bench.report import NOT_MEASURED, NOTHING, provenance, write
from bench.results import RESULTS, Row, is_ours, load
from multiattn.inspect.options import count
from parity.report import Table

Way = Literal["ring", "heads", "both"]
WAYS: tuple[Way, ...] = ("ring", "heads", "both")
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
SEQ = 1 << 20
FILES: Mapping[Direction, str] = {"fwd": "standard.json", "bwd": "backward.json"}

GPUS_PER_NODE = 8
NVLINK = 450e9
"""Bytes per second from a GPU to others of its node. NVLink 4 of H100 and H200 is stated as 900 GB/s both ways."""
INFINIBAND = 50e9
"""Bytes per second from a GPU to one of another node: an adapter of 400 Gb/s for each (ConnectX-7, as in DGX H200)."""
MEMORY = 4.8e12
"""Bytes per second of an H200's memory, as stated."""
SHARE = 0.8
"""The share of these that a large transfer reaches. A guess."""
LATENCY_S = 20e-6
"""Seconds that a transfer takes however short it is, its launch included. A guess."""

BYTES = 2
"""Bytes of an element of q, k, v and out: bf16."""
SUM_BYTES = 4
"""Bytes of an element that steps add to: fp32."""
FLOP_PER_PAIR: Mapping[Direction, float] = {"fwd": 4.0, "bwd": 10.0}
"""For each element of head_dim, as bench counts them."""

Rates = Mapping[tuple[Direction, bool], Mapping[int, float]]
"""Measured TFLOPS by direction, causal or not, and length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """Causal attention of one sequence in bf16."""

    seq: int = SEQ
    heads: int = 64
    heads_kv: int = 8
    head_dim: int = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """One pass of one layer on `ranks` GPUs, as predicted; all ranks do the same work."""

    ranks: int
    steps: int
    compute_s: float
    """Seconds of one step's work, adding its result to that of the steps before included."""
    transfer_s: float
    """Seconds to get the next step's keys and values, and in the backward their gradients, while this step works."""
    exchange_s: float
    """Seconds of all exchanges of tokens for heads and back. Nothing overlaps them."""
    alone_s: float
    """Seconds of one GPU, if it could hold the sequence."""

    @property
    def hides_transfers(self) -> bool:
        """True if no step waits for keys."""
        return self.steps == 1 or self.transfer_s <= self.compute_s

    @property
    def total_s(self) -> float:
        """Seconds of it all; nothing is awaited in the last step."""
        waits = max(self.transfer_s - self.compute_s, 0.0)
        return self.exchange_s + self.steps * self.compute_s + (self.steps - 1) * waits

    @property
    def efficiency(self) -> float:
        """The time of one GPU over that of these GPUs together."""
        return self.alone_s / (self.ranks * self.total_s)


def fastest(rows: Iterable[Row], head_dim: int) -> list[Row]:
    """The row of the fastest of our backends in each cell without features, back to back."""
    found: dict[Cell, Row] = {}
    for row in rows:
        cell = row.cell
        is_plain = cell.feature == "none" and cell.window is None and cell.heads_kv is None
        if row.tflops and row.regime == "device" and is_ours(row.contender) and is_plain and cell.head_dim == head_dim:
            found[cell] = max(row, found.get(cell, row), key=lambda it: it.tflops)
    return list(found.values())


def rates_of(rows: Iterable[Row]) -> Rates:
    """TFLOPS of rows by what a prediction asks for."""
    found: dict[tuple[Direction, bool], dict[int, float]] = {}
    for row in rows:
        by_seq = found.setdefault((row.cell.direction, row.cell.causal), {})
        by_seq[row.cell.seq] = max(row.tflops, by_seq.get(row.cell.seq, 0.0))
    return found


def speed_of(rates: Rates, direction: Direction, causal: bool, seq: int) -> float | None:
    """FLOP per second of the longest measured length up to `seq`; None where all are longer."""
    measured = rates.get((direction, causal), {})
    able = [it for it in measured if it <= seq]
    return measured[max(able)] * 1e12 if able else None


def forecast(layer: Layer, direction: Direction, ranks: int, way: Way, rates: Rates) -> Forecast | None:
    """One way on `ranks` GPUs; None where it cannot be divided so, or where no speed of such lengths was measured."""
    sharing = {"ring": 1, "heads": ranks, "both": min(GPUS_PER_NODE, ranks)}[way]  # ranks that divide heads
    steps = ranks // sharing
    if layer.heads % sharing or layer.seq % (2 * ranks):
        return None
    tokens = layer.seq // steps
    heads, heads_kv = layer.heads // sharing, max(layer.heads_kv / sharing, 1)  # each rank needs one of k and v
    alone = speed_of(rates, direction, True, layer.seq)
    half = tokens // 2  # of the keys, or of the queries
    speed = alone if steps == 1 else speed_of(rates, direction, False, half)
    if alone is None or speed is None:
        return None
    work = FLOP_PER_PAIR[direction] * layer.head_dim * layer.heads * layer.seq**2 / 2
    compute_s, transfer_s, exchange_s = work / (sharing * steps**2) / speed, 0.0, 0.0
    if steps > 1:
        is_forward = direction == "fwd"
        added = tokens * layer.head_dim * (heads if is_forward else heads + 2 * heads_kv)
        compute_s += added * (2 * SUM_BYTES + BYTES) / (MEMORY * SHARE)  # read a sum and a part, write the sum
        moved = 2 * tokens * layer.head_dim * heads_kv * (BYTES if is_forward else BYTES + SUM_BYTES)
        transfer_s = _transfer_s(moved, NVLINK if ranks <= GPUS_PER_NODE else INFINIBAND)  # the slowest hop of a ring
    if sharing > 1:
        q, kv = (tokens * it * layer.head_dim * BYTES for it in (heads, 2 * heads_kv))
        exchange_s = _exchange_s(q + kv, sharing) + _exchange_s(q, sharing)
    return Forecast(
        ranks=ranks,
        steps=steps,
        compute_s=compute_s,
        transfer_s=transfer_s,
        exchange_s=exchange_s,
        alone_s=work / alone,
    )


def _transfer_s(size: float, link: float) -> float:
    return LATENCY_S + size / (link * SHARE)


def _exchange_s(size: float, sharing: int) -> float:
    """Seconds until a rank has `size` bytes, an equal part from each of its group: both kinds of link at once."""
    near = min(sharing, GPUS_PER_NODE)
    within = _transfer_s(size * (near - 1) / sharing, NVLINK)
    across = _transfer_s(size * (sharing - near) / sharing, INFINIBAND)
    return max(within, across)


# ---------------------------------------------------------------- tables

HEADER = (
    *("GPUs", "tokens of each"),
    *("ring: work / transfer of a step, ms", "efficiency"),
    *("heads: exchanges, ms", "efficiency"),
    *("both: work / transfer of a step, ms", "exchanges, ms", "efficiency"),
)


def table(layer: Layer, direction: Direction, rates: Rates) -> Table:
    """A line for each number of GPUs."""
    rows = []
    for ranks in RANKS:
        ring, heads, both = (forecast(layer, direction, ranks, way, rates) for way in WAYS)
        line = [f"{ranks}", f"{layer.seq // ranks}", _steps(ring), _percent(ring)]
        line += [_exchanges(heads), _percent(heads), _steps(both), _exchanges(both), _percent(both)]
        rows.append(tuple(line))
    return Table(title=title(layer, direction), note="", header=HEADER, rows=tuple(rows))


def title(layer: Layer, direction: Direction) -> str:
    """The layer and the pass in words."""
    sizes = f"{layer.seq} tokens, {layer.heads} query heads on {layer.heads_kv} key/value heads, D = {layer.head_dim}"
    return f"Predicted: {'forward' if direction == 'fwd' else 'backward'}, causal, bf16, {sizes}"


def _steps(it: Forecast | None) -> str:
    if it is None or it.steps == 1:
        return NOTHING
    return f"{_ms(it.compute_s)} / {_ms(it.transfer_s)}, {'hidden' if it.hides_transfers else 'waits'}"


def _exchanges(it: Forecast | None) -> str:
    return NOTHING if it is None else _ms(it.exchange_s)


def _percent(it: Forecast | None) -> str:
    return NOTHING if it is None else f"{100 * it.efficiency:.0f} %"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}" if seconds >= 0.0995 else f"{1000 * seconds:#.3g}"


def assumptions() -> str:
    """The constants and the model in a list."""
    lines = (
        f"A node has {GPUS_PER_NODE} GPUs. Within it, NVLink moves {NVLINK / 1e9:g} GB/s from each GPU; across nodes, "
        f"each GPU has an adapter of {INFINIBAND / 1e9:g} GB/s. A transfer reaches {100 * SHARE:g} % of that and takes "
        f"{1e6 * LATENCY_S:g} us more. Both numbers are guesses.",
        f"A ring is as fast as its slowest hop, which is InfiniBand's beyond {GPUS_PER_NODE} GPUs. Transfers overlap a "
        "step's work and slow nothing down. Exchanges of tokens for heads overlap nothing.",
        "In each step all ranks see equally many pairs.",
        "A step of a ring computes at the measured speed of full attention over half of its tokens, or over the "
        "longest measured length below that. One GPU alone, and heads without a ring, compute at the measured speed of "
        "causal attention. Lengths beyond the longest measured one are as fast as that one. Measured cells have as "
        "many query as key/value heads, and 16k tokens or more to fill the GPU with.",
        f"After each step of a ring, its result is added to a sum in fp32, in memory of {MEMORY / 1e12:g} TB/s, of "
        f"which {100 * SHARE:g} % are reached. In the backward, fp32 gradients travel with the keys and values.",
        "Nothing else costs time: no launch, no wait of one rank for another, no other traffic on the links.",
        "Efficiency is the time of one GPU, if it could hold the sequence, over the sum of the times of all. It passes "
        "100 % where a step of full attention was measured faster than causal attention.",
    )
    return "\n".join(f"- {line}" for line in lines)


def measured(head_dim: int, folder: Path, directions: Iterable[Direction] = FILES) -> list[Row]:
    """The fastest rows of a GPU's results."""
    paths = (folder / FILES[it] for it in directions)
    return fastest((row for path in paths if path.exists() for row in load(path)), head_dim)


def predict(options: argparse.Namespace) -> int:
    """Predict attention of a long sequence over 8 to 1,024 GPUs from the speed of one; nothing is measured."""
    layer = Layer(seq=options.seq, heads=options.heads, heads_kv=options.heads_kv, head_dim=options.head_dim)
    if layer.heads % layer.heads_kv:
        raise InputError(f"--heads-kv: got {layer.heads_kv}; allowed divisors of --heads {layer.heads}")
    rows = measured(layer.head_dim, options.results)
    if not rows:
        raise InputError(f"--head-dim: got {layer.head_dim}; {options.results} has no speed of it")
    for direction in FILES:
        made = table(layer, direction, rates_of(rows))
        print(f"\n{made.title}\n\n{write(made, 'simple')}")
    print(f"\nNothing here was measured on more than one GPU. Assumptions:\n{assumptions()}\n\nSpeeds of one GPU:")
    print("\n".join(provenance(rows)))
    return 0


def block(folder: Path, direction: Direction) -> str:
    """A table of a page."""
    layer = Layer()
    rows = measured(layer.head_dim, folder, [direction])
    made = table(layer, direction, rates_of(rows))
    return "\n\n".join((f"**{made.title}**", write(made, "github"), *provenance(rows))) if rows else NOT_MEASURED


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The layer, and where speeds are from."""
    usual = Layer()
    command.add_argument("--seq", type=count, default=usual.seq, help="tokens (%(default)s)")
    command.add_argument("--heads", type=count, default=usual.heads, help="query heads (%(default)s)")
    command.add_argument("--heads-kv", type=count, default=usual.heads_kv, help="key/value heads (%(default)s)")
    command.add_argument("--head-dim", type=count, default=usual.head_dim, help="%(default)s")
    command.add_argument(
        "--results", type=Path, default=RESULTS / "h200", help="of one GPU; default bench/results/h200"
    )
