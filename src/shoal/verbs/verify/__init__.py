"""shoal verify: two trainings compared, the first difference explained, and known mistakes planted to test itself."""

import importlib
from typing import TYPE_CHECKING, Any

from shoal.verbs.verify.answer import answer
from shoal.verbs.verify.command import command

if TYPE_CHECKING:
    from shoal.verbs.verify.recording import Recording as Recording
    from shoal.verbs.verify.runs import compare_runs as compare_runs
    from shoal.verbs.verify.selftest import self_test as self_test

_LATER = {"Recording": "recording", "compare_runs": "runs", "self_test": "selftest"}  # these import torch
__all__ = ["Recording", "answer", "command", "compare_runs", "self_test"]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'shoal.verbs.verify' has no attribute {name!r}")
    return getattr(importlib.import_module(f"shoal.verbs.verify.{_LATER[name]}"), name)
