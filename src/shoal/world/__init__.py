"""Opens the live processes. The only room (but `launch`) that reads the environment. No torch until one is opened."""

from shoal.world.place import Place, before_torch, environment
from shoal.world.world import World

__all__ = ["Place", "World", "before_torch", "environment"]
