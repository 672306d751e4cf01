"""The backward for Hopper with dS stored: a kernel for dk and dv, and one for dq; `backward_wgmma_stored.cuh`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from multiattn.cuda.backward_wgmma import mean_columns
from multiattn.cuda.backward_wgmma_two_pass import QUERY_TILE, HopperKeysConfig
from multiattn.cuda.family import ELEMENT_BYTES, padded
from multiattn.cuda.naming import aggregate, features_of, traits_type
from multiattn.cuda.source import Instance, PlannedLaunch, StoredHeads, WgmmaBackwardParams
from multiattn.cuda.wgmma import BARRIER_BYTES, WARPGROUP_ROWS, width_bytes
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Plan
from multiattn.plan.config import Config
from multiattn.plan.limits import Check, between, limited, one_of
from multiattn.plan.schedule import STORED_BYTES, STORED_HEAD_BYTES, most_multiprocessors
from multiattn.plan.waves import Walk, efficiency
from multiattn.problem import Problem

_DS_BUFFERS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredQueriesConfig(Config):
    """Launch parameters of the kernel of dq."""

    tile_m: int = limited(one_of(QUERY_TILE), default=QUERY_TILE)
    tile_n: int = limited(one_of(WARPGROUP_ROWS), default=WARPGROUP_ROWS)
    stages: int = limited(between(2, 8), default=4)
    """Buffers of K, with dS of its keys."""
    cluster: int = limited(one_of(1, 2), default=1)
    """Blocks of a cluster, which share K: TMA reads it once for both. Of problems with a mask each block is alone."""

    def blocks(self, problem: Problem, heads: int) -> int:
        """Blocks of so many query heads: whole clusters."""
        return padded(-(-problem.seq_q // self.tile_m), self.cluster_of(problem)) * heads

    def cluster_of(self, problem: Problem) -> int:
        """The blocks of a cluster."""
        return 1 if problem.is_banded else self.cluster

    def smem_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory of a block, which the kernel asserts when compiled."""
        row_bytes = width_bytes(problem.head_dim)
        return self.stages * self.tile_n * (row_bytes + self.tile_m * ELEMENT_BYTES) + BARRIER_BYTES

    def candidates(self, problem: Problem) -> Iterator[StoredQueriesConfig]:
        """Other buffers that a sweep tries, and clusters."""
        tried = itertools.product((2, 3, 4, 5), (1, 2))
        return (replace(self, stages=stages, cluster=cluster) for stages, cluster in tried)


@dataclass(frozen=True, kw_only=True, slots=True)
class WgmmaStoredConfig(HopperKeysConfig):
    """Launch parameters of Hopper's backward with dS stored.

    The kernel of dk and dv, which stores it, and that of dq, one product, take turns: each has as many heads at a time
    as `STORED_BYTES` have dS of, but at least one.
    """

    dq: StoredQueriesConfig = field(default_factory=StoredQueriesConfig)

    def smem_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory of a block of the kernel of dk and dv, which asserts it when compiled."""
        return HopperKeysConfig.smem_bytes(self, problem) + _DS_BUFFERS * self.tile_m * self.tile_n * ELEMENT_BYTES

    def walks(self, problem: Problem) -> tuple[Walk, ...]:
        """That of dk and dv, and the kernel of dq."""
        of_keys = self.walk("kv", mean_columns(problem, of_k=2, of_v=2), products=4, begin=5)
        return of_keys, self.dq.walk("q", mean_columns(problem, of_k=1), products=1, begin=5)

    def head_bytes(self, problem: Problem) -> int:
        """Bytes of dS of a head of keys: whole tiles of both kernels."""
        rows = -(-problem.seq_q // QUERY_TILE) * QUERY_TILE * problem.group
        return max(rows * -(-problem.seq_kv // self.tile_n) * self.tile_n * ELEMENT_BYTES, 1)

    def rounds(self, problem: Problem) -> list[range]:
        """The heads of keys of each turn, which count through the batch: nearly as many in each."""
        heads = problem.batch * problem.heads_kv
        turns = -(-heads // max(STORED_BYTES // self.head_bytes(problem), 1))
        each = max(-(-heads // max(turns, 1)), 1)
        return [range(first, min(first + each, heads)) for first in range(0, heads, each)]

    def busy(self, problem: Problem, arch: Arch) -> float:
        """By waves of the first turn."""
        turns = self.rounds(problem)
        if len(turns) < 2:
            return 1.0
        launch = replace(problem, batch=1, heads_q=len(turns[0]) * problem.group, heads_kv=len(turns[0]))
        of_turn, of_all = (efficiency(it, self.walks(it), most_multiprocessors(arch)) for it in (launch, problem))
        return of_turn / of_all if of_all else 1.0

    def areas(self, problem: Problem) -> dict[str, int]:
        """Statistics, the counters, and dS of the heads of a turn."""
        most = max(map(len, self.rounds(problem)), default=0)
        return {**HopperKeysConfig.areas(self, problem), "ds": most * self.head_bytes(problem)}

    def key_checks(self, problem: Problem) -> tuple[Check, ...]:
        """First whether dS of a head is stored."""
        head_bytes = self.head_bytes(problem)
        needed = f"{head_bytes >> 20} MiB for dS of one head of keys"
        fits = (head_bytes <= STORED_HEAD_BYTES, needed, f"up to {STORED_HEAD_BYTES >> 20} MiB")
        return (fits, *HopperKeysConfig.key_checks(self, problem))

    def launches(self, plan: Plan) -> tuple[PlannedLaunch, ...]:
        """Statistics, then for some heads at a time dk and dv, and dq."""
        problem = plan.problem
        keys = self.keys_kernel(plan, "_stored", rows="multiattn::Stored", lists=StoredHeads)
        stages, cluster = self.dq.stages, self.dq.cluster_of(problem)
        config = aggregate("StoredQueriesConfig", stages=stages, cluster=cluster)
        constants = (features_of(problem, "backward"), config, "multiattn::NoScore", "multiattn::Stored")
        shape = f"{problem.band.kind}_s{stages}{'_cluster' * (cluster > 1)}"
        queries = Instance(
            name=f"backward_wgmma_stored_{problem.dtype}_{problem.widths_in_names}_{shape}",
            header="backward_wgmma_stored.cuh",
            entry="backward_wgmma_stored",
            traits=traits_type("StoredQueriesTraits", problem, *constants),
            params=WgmmaBackwardParams,
            lists=StoredHeads,
            threads=self.threads,
            smem_bytes=self.dq.smem_bytes(problem),
            wgmma_columns=(problem.head_dim,),
            cluster=cluster,
            overlaps=True,
            arch_features=True,
        )
        tiles_kv = -(-problem.seq_kv // self.tile_n)
        launches = [self.statistics(problem, QUERY_TILE, "_two_pass", has_dq_sum=False)]
        for heads in self.rounds(problem):
            numbers = {"first_head": heads.start, "heads": len(heads)}
            of_queries = self.dq.blocks(problem, len(heads) * problem.group)
            for kernel, blocks in ((keys, tiles_kv * len(heads)), (queries, of_queries)):
                launches.append(PlannedLaunch(kernel=kernel, blocks=blocks, is_persistent=True, numbers=numbers))
        return tuple(launches)
