"""The global random streams, seeded from one place."""

import hashlib
import random

import numpy as np
import torch


def seed_everything(*parts: object) -> None:
    """Seed every global stream (torch on all devices, numpy, python) from one place: a hash of `parts`."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "big") >> 1
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
