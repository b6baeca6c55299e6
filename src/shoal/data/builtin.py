"""Handwritten digits, without a download: they ship with scikit-learn."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from shoal.data.order import sample_order
from shoal.errors import DataError

_NUM_TEST = 360
_SPLIT_SEED = 0


def digits(train: bool = True) -> TensorDataset:
    """Images of handwritten digits and their labels, 1437 to train on or the other 360 to test on.

    Images are float32 of shape (1, 8, 8) in [0, 1], labels int64 scalars from 0 to 9. The split is drawn once
    for all, from no global stream.

    Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998, by way of
    scikit-learn.
    """
    table = torch.from_numpy(_read_table())
    order = torch.from_numpy(sample_order(len(table), _SPLIT_SEED, 0, 0, len(table)))
    rows = table[order[_NUM_TEST:] if train else order[:_NUM_TEST]]
    return TensorDataset(rows[:, :-1].reshape(-1, 1, 8, 8) / 16, rows[:, -1].long())


def _read_table() -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    """The rows of the file that scikit-learn reads: importing it to do so would cost a second."""
    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise DataError("the digits ship with scikit-learn, which is not installed: pip install scikit-learn")
    path = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    if path.is_file():
        return np.loadtxt(path, delimiter=",", dtype=np.float32)
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return np.column_stack((bunch.data, bunch.target)).astype(np.float32)
