"""A fingerprint tells two tensors apart by one bit, and is the same for the same bits, however they lie in memory."""

import pytest
import torch

from shoal.agreement import fingerprint

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.bool]
LARGE, SMALL = (37, 8200), (3, 5)  # in bytes no multiple of a row; below one


def drawn(shape, dtype=torch.float32):
    torch.manual_seed(1)
    return torch.randn(shape).gt(0) if dtype is torch.bool else (100 * torch.randn(shape)).to(dtype)


def flipped(tensor, byte):
    """The same with one bit flipped."""
    other = tensor.clone()
    other.view(-1).view(torch.uint8)[byte] ^= 1
    return other


@pytest.mark.parametrize("shape", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bit_shows_wherever_it_is(dtype, shape):
    tensor = drawn(shape, dtype)
    num_bytes = tensor.numel() * tensor.itemsize
    found = {fingerprint(flipped(tensor, byte)) for byte in (0, num_bytes // 3, num_bytes // 2, num_bytes - 1)}
    assert len(found | {fingerprint(tensor)}) == 5
    assert fingerprint(tensor.clone()) == fingerprint(tensor)


@pytest.mark.parametrize("shape", [LARGE, SMALL], ids=["large", "small"])
def test_values_at_other_places_show(shape):
    tensor = drawn(shape)
    others = [tensor.flip(0), tensor.flip(1), tensor.roll(1, 0), tensor.roll(1, 1), -tensor, tensor.view(shape[::-1])]
    swapped = tensor.clone()
    swapped[0, 0], swapped[-1, -1] = tensor[-1, -1].clone(), tensor[0, 0].clone()
    assert len({fingerprint(other) for other in [tensor, swapped, *others]}) == 8


def test_words_that_change_places_along_a_row_or_a_column_of_the_sums_show():
    words = torch.arange(4 * 8192).view(4, 8192)
    along_a_row = words.index_select(1, torch.arange(8192).roll(1))
    along_a_column = words.index_select(0, torch.arange(4).roll(1))
    assert len({fingerprint(x.flatten()) for x in (words, along_a_row, along_a_column)}) == 3


def test_zeros_of_either_sign_and_all_kinds_of_nan_differ():
    zeros = torch.zeros(40_000)
    nan = zeros.clone().fill_(torch.nan)
    assert len({fingerprint(x) for x in [zeros, -zeros, nan, flipped(nan, 0), zeros.to(torch.int32)]}) == 5


def test_how_it_lies_in_memory_makes_no_difference():
    tensor = drawn(LARGE)
    padded = torch.zeros(tensor.numel() + 1)
    padded[1:] = tensor.flatten()
    conj = drawn(LARGE, torch.complex64)
    assert fingerprint(padded[1:].view(LARGE)) == fingerprint(tensor)
    assert fingerprint(tensor.t().contiguous().t()) == fingerprint(tensor)
    assert fingerprint(conj.conj()) == fingerprint(conj.conj().resolve_conj()) != fingerprint(conj)


def test_a_sparse_tensor_is_told_by_where_its_values_are():
    at = [torch.tensor([[place], [place]]) for place in (0, 1)]
    first, second = (torch.sparse_coo_tensor(index, [1.0], (2, 2), check_invariants=True) for index in at)
    assert fingerprint(first) != fingerprint(second)


def test_what_holds_no_value_has_one_too():
    assert fingerprint(torch.empty(0, 3)) != fingerprint(torch.empty(3, 0))
    assert fingerprint(torch.tensor(1.0)) != fingerprint(torch.tensor(2.0))
