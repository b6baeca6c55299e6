"""Batches by step number, the same samples in every layout; and data sets that need no download."""

from shoal.data.builtin import digits
from shoal.data.plan import RankBatch
from shoal.data.share import Shared, share
from shoal.data.text import StdlibText, TextFolder, TokenFile

__all__ = ["RankBatch", "Shared", "StdlibText", "TextFolder", "TokenFile", "digits", "share"]
