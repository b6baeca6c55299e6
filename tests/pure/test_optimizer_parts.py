"""An optimizer that ranks cannot run each on its part is refused before step one."""

import pytest
import torch
from torch import nn

from shoal.agreement import check_fits_parts
from shoal.errors import JobError
from shoal.layout import Layout


class GlobalNorm(torch.optim.SGD):
    """Divides every gradient by the norm of all of them."""

    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        total = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.grad /= total
        return super().step(closure)


class RowNorm(torch.optim.SGD):
    """Divides every gradient by its own norm: right on a whole matrix, wrong on a part of it."""

    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            p.grad /= p.grad.norm() + 1e-30
        return super().step(closure)


def check(kind, layout, **values):
    optimizer = kind([nn.Parameter(torch.ones(3, 2))], lr=0.1, **values)
    parsed = Layout.parse(layout)
    check_fits_parts(optimizer, parsed, cuts_matrices=parsed.tp > 1)


@pytest.mark.parametrize("layout", ["pp2", "fsdp2", "tp2", "pp2.fsdp2.tp2"])
@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad]
)
def test_optimizers_by_element_fit_everywhere(kind, layout):
    check(kind, layout)


@pytest.mark.parametrize(
    ("kind", "layout", "why"),
    [
        (GlobalNorm, "pp2", "each parameter by itself"),
        (GlobalNorm, "tp2", "each element by itself"),
        (RowNorm, "tp2", "each element by itself"),
        (torch.optim.Adafactor, "tp2", "each element by itself"),
        (torch.optim.Adafactor, "pp2", "each parameter by itself"),
        (torch.optim.Adafactor, "fsdp2", r"another shape than its parameter \(row_var, col_var\)"),
        (torch.optim.Muon, "tp2", "each element by itself"),
    ],
)
def test_one_that_mixes_what_lies_apart_is_refused(kind, layout, why):
    with pytest.raises(JobError, match=why):
        check(kind, layout)


@pytest.mark.parametrize(("kind", "layout"), [(RowNorm, "pp2"), (torch.optim.Muon, "pp2"), (torch.optim.Muon, "fsdp2")])
def test_one_that_looks_at_a_matrix_fits_where_matrices_stay_whole(kind, layout):
    check(kind, layout)
