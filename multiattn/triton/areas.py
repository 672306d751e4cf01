"""Areas of workspace that are a variant's own, and no tensors of a Problem."""

from __future__ import annotations

from collections.abc import Mapping

from multiattn.layout import Layout
from multiattn.plan.config import Config
from multiattn.problem import Problem
from multiattn.triton import decode_configs, gluon_backward_configs, gluon_two_pass_configs


def areas_of(problem: Problem, config: Config | None) -> Mapping[str, Layout]:
    """The areas of a launch by their names; none of most variants."""
    if isinstance(config, gluon_backward_configs.GluonBackwardConfig):
        return gluon_backward_configs.areas_of(problem)
    if isinstance(config, gluon_two_pass_configs.GluonTwoPassConfig):
        return gluon_two_pass_configs.areas_of(problem)
    return decode_configs.areas_of(problem, config)
