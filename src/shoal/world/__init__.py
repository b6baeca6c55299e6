"""Opens the live processes. The only room (but `launch`) that reads the environment. No torch until one is opened.

place.py        who am I: torchrun, Slurm, MPI, flags
rendezvous.py   an address -> a store that all ranks reach
roll.py         are all there, each once
network.py      this host: names, interfaces, ports
device.py       which device is mine
group.py        the process groups, opened and destroyed
messages.py     what is asked of the groups and waited for, noted
signature.py    what must be the same in a call of all ranks
desync.py       whether all ranks make the same calls
sentry.py       a thread that speaks for a rank that waits, under other launchers
world.py        World: all of it, and the collectives of set-up
"""

from shoal.world.place import HOST_VARIABLE, Place, before_torch, environment, host_names
from shoal.world.world import World

__all__ = ["HOST_VARIABLE", "Place", "World", "before_torch", "environment", "host_names"]
