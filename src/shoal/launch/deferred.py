"""`torch._dynamo`, which optimizers and DDP import only to learn that nothing is being compiled, put off.

Measured with torch 2.13: half a second of every start, a quarter of the time to the first step. A stand-in answers
the few questions of a run that compiles nothing; anything else brings in the real module, which takes its place.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

_NAME = "torch._dynamo"


class _StandIn(ModuleType):
    """The answers that the real module gives when nothing is compiled, and a way to the real one for all else."""

    def __init__(self) -> None:
        super().__init__(_NAME)
        self.utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")  # DDP's constructor
        self.trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)  # init_process_group

    def graph_break(self) -> None:
        """Around every step of an optimizer: where a compiler would have to stop."""

    def disable(self, fn: Callable[..., Any], *how: Any, **more: Any) -> Callable[..., Any]:
        """`fn`, which a compiler, once there is one, must leave alone."""
        kept = functools.cache(lambda: _real().disable(fn, *how, **more))

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (fn if sys.modules[_NAME] is self else kept())(*args, **kwargs)

        return call

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)  # a look at what kind of module this is
        return getattr(_real(), name)


def defer_dynamo() -> None:
    """Let the stand-in stand where the module is not imported yet; after `import torch`."""
    if _NAME not in sys.modules:
        sys.modules[_NAME] = vars(sys.modules["torch"])["_dynamo"] = _StandIn()


def _real() -> ModuleType:
    if isinstance(sys.modules[_NAME], _StandIn):
        del sys.modules[_NAME], vars(sys.modules["torch"])["_dynamo"]
    return importlib.import_module(_NAME)
