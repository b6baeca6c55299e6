"""Parts: which boxes of a whole tensor a rank holds, and that those of all ranks tile it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.parallel.parts import Box, Part, cut, gather_whole, keep_parts, num_copies, parts_of, paste
from shoal.parallel.tensor.units import Units
from shoal.world import World


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def test_a_whole_part_is_one_box_over_everything() -> None:
    part = Part.whole((4, 6))
    assert part == Part((4, 6), (Box((0, 0), (0, 0), (4, 6)),), ())
    assert part.is_whole
    assert part.local_shape == (4, 6)


def test_the_right_half_of_the_columns() -> None:
    part = Part.whole((4, 6)).take(1, [(3, 6)], "tp")
    assert part.boxes == (Box(local=(0, 0), whole=(0, 3), size=(4, 3)),)
    assert part.axes == ("tp",)
    assert not part.is_whole
    assert part.local_shape == (4, 3)


def test_one_head_of_a_fused_matrix_has_a_box_in_each_of_q_k_and_v() -> None:
    part = Part.whole((12, 5)).take(0, [(2, 4), (6, 8), (10, 12)], "tp")
    assert part.boxes == (
        Box(local=(0, 0), whole=(2, 0), size=(2, 5)),
        Box(local=(2, 0), whole=(6, 0), size=(2, 5)),
        Box(local=(4, 0), whole=(10, 0), size=(2, 5)),
    )
    assert part.local_shape == (6, 5)


def test_rows_of_a_part_that_begin_in_the_middle_of_a_box() -> None:
    """tp takes rows 2-3, 6-7 and 10-11 of q, k and v; of those six rows fsdp takes the three from the second on."""
    part = Part.whole((12, 5)).take(0, [(2, 4), (6, 8), (10, 12)], "tp").take(0, [(1, 4)], "fsdp")
    assert part.boxes == (
        Box(local=(0, 0), whole=(3, 0), size=(1, 5)),
        Box(local=(1, 0), whole=(6, 0), size=(2, 5)),
    )
    assert part.axes == ("tp", "fsdp")


def test_columns_by_tp_then_rows_by_fsdp_is_one_block() -> None:
    part = Part.whole((4, 6)).take(1, [(3, 6)], "tp").take(0, [(2, 4)], "fsdp")
    assert part.boxes == (Box(local=(0, 0), whole=(2, 3), size=(2, 3)),)
    assert cut(numbered(4, 6), part).tolist() == [[15, 16, 17], [21, 22, 23]]


@pytest.mark.parametrize("rows", [(0, 0), (3, 3)])
def test_a_rank_without_rows_holds_an_empty_tensor(rows: tuple[int, int]) -> None:
    part = Part.whole((3, 5)).take(0, [rows], "fsdp")
    assert part.local_shape == (0, 5)
    local = cut(numbered(3, 5), part)
    assert local.shape == (0, 5)
    whole = torch.full((3, 5), -1)
    paste(whole, local, part)
    assert (whole == -1).all()


def test_a_rank_without_rows_of_a_part_that_is_cut_already() -> None:
    part = Part.whole((12, 5)).take(0, [(2, 4), (6, 8)], "tp").take(0, [(4, 4)], "fsdp")
    assert part.local_shape == (0, 5)
    assert part.axes == ("tp", "fsdp")


def test_a_rank_without_rows_of_columns_that_lie_in_two_boxes() -> None:
    """An output matrix behind a fused gate and value, on more fsdp ranks than it has rows."""
    part = Part.whole((1, 8)).take(1, [(0, 2), (4, 6)], "tp").take(0, [(1, 1)], "fsdp")
    assert part.local_shape == (0, 4)


def test_a_number_without_dims_is_whole() -> None:
    part = Part.whole(())
    assert part.local_shape == ()
    assert cut(torch.tensor(3.0), part) == 3.0


def test_what_is_whole_is_handed_out_as_it_is() -> None:
    tensor = torch.ones(2, 3)
    assert cut(tensor, Part.whole((2, 3))) is tensor


def test_cut_and_paste_keep_the_dtype_and_every_bit() -> None:
    whole = torch.tensor([[0.0, -0.0], [float("nan"), float("inf")]], dtype=torch.bfloat16)
    part = Part.whole((2, 2)).take(1, [(1, 2)], "tp")
    local = cut(whole, part)
    back = torch.zeros_like(whole)
    paste(back, local, part)
    assert local.dtype == torch.bfloat16
    assert back[:, 1].view(torch.int16).tolist() == whole[:, 1].view(torch.int16).tolist()


# -- the parts of all ranks tile the whole -------------------------------------------------------------


@st.composite
def fused(draw: st.DrawFn) -> tuple[int, list[int], int]:
    """Heads, the widths of the fused parts, ranks."""
    heads = draw(st.integers(1, 7))
    widths = [heads * draw(st.integers(1, 4)) for _ in range(draw(st.integers(1, 3)))]
    return heads, widths, draw(st.integers(1, heads))


def rows_of(num: int, size: int, rank: int) -> tuple[int, int]:
    """As fully_shard cuts: chunks of one size, rounded up."""
    chunk = -(-num // size)
    return min(num, rank * chunk), min(num, (rank + 1) * chunk)


@given(fused(), st.integers(1, 3), st.integers(0, 1), st.integers(1, 4))
def test_the_parts_of_all_ranks_tile_the_whole(
    heads_widths_tp: tuple[int, list[int], int], other: int, dim: int, fsdp: int
) -> None:
    heads, widths, tp = heads_widths_tp
    shape = (sum(widths), other) if dim == 0 else (other, sum(widths))
    whole, back, times = numbered(*shape), torch.full(shape, -1), torch.zeros(shape, dtype=torch.int64)
    for tp_rank in range(tp):
        slice_ = Part.whole(shape).take(dim, Units(heads, tuple(widths), tp).spans(tp_rank), "tp")
        assert cut(whole, slice_).shape == slice_.local_shape
        for fsdp_rank in range(fsdp):
            start, stop = rows_of(slice_.local_shape[0], fsdp, fsdp_rank)
            part = slice_.take(0, [(start, stop)], "fsdp")
            local = cut(whole, part)
            assert torch.equal(local, cut(whole, slice_)[start:stop])  # what torch's own sharding keeps
            assert local.shape == part.local_shape
            paste(back, local, part)
            paste(times, times.new_ones(part.local_shape) + cut(times, part), part)
    assert torch.equal(back, whole)
    assert (times == 1).all()


# -- the parts of a model ------------------------------------------------------------------------------


def tied() -> nn.Module:
    model = nn.ModuleDict({"embed": nn.Embedding(6, 4), "head": nn.Linear(4, 6), "norm": nn.BatchNorm1d(4)})
    model["head"].weight = model["embed"].weight
    return model


def test_a_model_that_nothing_has_cut_has_whole_parts_for_every_name_of_its_state() -> None:
    model = tied()
    parts = parts_of(model)
    assert set(parts) == set(model.state_dict())
    assert all(part.is_whole for part in parts.values())
    assert parts["norm.num_batches_tracked"].local_shape == ()


def test_parts_that_were_kept_are_told_and_are_no_part_of_the_module() -> None:
    model = tied()
    half = Part.whole((6, 4)).take(0, [(0, 3)], "tp")
    keep_parts(model, {"embed.weight": half})
    assert parts_of(model)["embed.weight"] == half
    assert parts_of(model)["head.bias"].is_whole
    assert not any("shoal" in name for name in model.state_dict())


def test_in_a_fake_world_copies_are_counted_and_nothing_is_gathered() -> None:
    with World.open("dp2.fsdp3.tp2", kind="fake") as world:
        whole = Part.whole((4, 6))
        columns = whole.take(1, [(0, 3)], "tp")
        assert num_copies(whole.axes, world) == 12
        assert num_copies(columns.axes, world) == 6
        assert num_copies(columns.take(0, [(0, 2)], "fsdp").axes, world) == 2
        local = torch.ones(columns.local_shape)
        assert gather_whole({"a": local}, {"a": columns}, world)["a"].shape == (4, 3)
