"""The room of tests that need a CUDA device; elsewhere they are skipped, and say so."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.skip(reason="this machine has no CUDA device"))
