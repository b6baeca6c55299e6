"""Start N processes on this machine from one warm parent, watch them, say who failed first, leave no orphan."""

from shoal.launch.local import run_script, start
from shoal.launch.outcome import Failure, Outcome
from shoal.launch.warm import warm_up

__all__ = ["Failure", "Outcome", "run_script", "start", "warm_up"]
