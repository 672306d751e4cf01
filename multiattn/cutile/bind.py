"""The Binding of a forward for the tensors at hand, as the loader of emitted kernels asks for it. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from multiattn.cutile.configs import CutileConfig
from multiattn.cutile.table import IMAGE, launches_of
from multiattn.plan import abi
from multiattn.plan.backend import Plan


def bind(plan: Plan, image: abi.Image = IMAGE, emitted: Mapping[str, str] | None = None) -> abi.Binding:
    """The Binding of a forward Plan.

    Args:
        plan: for the tensors at hand, with variant and config of the kernel.
        image: of the kernel.
        emitted: what the kernel's code is specialised on; None while it is being emitted.
    """
    (launch,) = launches_of(plan, emitted=emitted)
    return replace(launch.binding, image=image)


def for_most_heads(plan: Plan) -> Plan:
    """A forward Plan whose code is to be emitted, with no more heads together than divide both.

    Else code for 6 heads would serve multiples of 6 only, or only certain batches, and not all even numbers of heads.
    """
    config = plan.config
    assert isinstance(config, CutileConfig)
    heads_together = math.gcd(config.heads_together, plan.problem.heads_q)
    return replace(plan, config=replace(config, heads_together=heads_together))
