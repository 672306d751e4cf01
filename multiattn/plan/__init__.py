"""Decisions, without tensors: a Problem and an arch give a Plan, or every reason against one."""
