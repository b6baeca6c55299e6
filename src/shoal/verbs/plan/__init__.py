"""`shoal plan`: what each rank of a layout holds, computes and sends, before there is a machine for it."""

from shoal.verbs.plan.command import PlanError, command
from shoal.verbs.plan.report import Plan

__all__ = ["Plan", "PlanError", "command"]
