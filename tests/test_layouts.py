"""Where rows lie: which strides are read in place, and that the numbers given to a kernel find every element."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tunegen.layouts import Rows, copied_back, is_copied, nested_copy, rows_of


def read(rows: Rows, count: int, hidden: int) -> Tensor:
    """The rows as a kernel finds them."""
    row, col = torch.arange(count)[:, None], torch.arange(hidden)[None, :]
    if rows.nested is None:
        places = row * rows.row_stride + col
    else:
        middle, inner, outer_stride, middle_stride, inner_stride, col_stride = rows.nested
        group = row // inner
        places = group // middle * outer_stride + group % middle * middle_stride + row % inner * inner_stride
        places = places + col * col_stride
    flat = torch.as_strided(rows.tensor, (int(places.max()) + 1,), (1,))
    return flat[places]


def in_order(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def base(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)


IN_PLACE = {
    "contiguous": base(3, 5, 8),
    "one row": base(8),
    "rows apart": base(6, 10)[:, :8],
    "every other row": base(12, 8)[::2],
    "heads transposed": base(2, 4, 5, 8).transpose(1, 2),
    "heads of a fused projection": base(2, 5, 12 * 8)[..., :32].unflatten(-1, (4, 8)),
    "part of a sequence": base(2, 7, 8)[:, :5],
    "a batch repeated": base(1, 5, 8).expand(3, 5, 8),
    "a position repeated": base(3, 1, 8).expand(3, 5, 8),
    "one number, expanded": base(1, 1).expand(6, 8),
    "one number, expanded to heads": base(1, 1, 1, 1).expand(2, 3, 4, 8),
    "one column": base(4, 3)[:, :1],
    "an axis of one": base(2, 1, 4, 8).transpose(0, 2),
    "a number a row": base(6, 1).expand(6, 8),
}
COPIED = {
    "columns apart": base(8, 6).t(),
    "a row with gaps": base(16)[::2],
    "four axes that do not join": base(2, 3, 2, 3, 8).permute(3, 1, 0, 2, 4)[::2, :2],
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_read_where_it_lies(name: str) -> None:
    tensor = IN_PLACE[name]
    rows = rows_of(tensor)
    assert rows.tensor.data_ptr() == tensor.data_ptr()
    assert not is_copied(tensor)
    assert torch.equal(read(rows, *in_order(tensor).shape), in_order(tensor))


@pytest.mark.parametrize("name", COPIED)
def test_copied_first(name: str) -> None:
    tensor = COPIED[name]
    rows = rows_of(tensor)
    assert is_copied(tensor)
    assert rows.tensor.data_ptr() != tensor.data_ptr()
    assert torch.equal(read(rows, *in_order(tensor).shape), in_order(tensor))


def test_only_rows_at_no_common_distance_are_nested() -> None:
    """A kernel that divides row numbers is for those that need it."""
    assert {name for name, tensor in IN_PLACE.items() if rows_of(tensor).nested is not None} == {
        "heads transposed",
        "heads of a fused projection",
        "part of a sequence",
        "a batch repeated",
        "a position repeated",
        "an axis of one",
        "one number, expanded",
        "one number, expanded to heads",
        "a number a row",
    }


def test_more_rows_than_31_bits_count_are_copied() -> None:
    """Of a tensor without memory: a kernel counts nested rows in 32 bits."""
    heads = torch.empty_strided((2**15, 2**16, 1, 2), (2, 2**17, 1, 1), device="meta")
    assert is_copied(heads)
    assert not is_copied(heads[: 2**14])


@pytest.mark.parametrize("rows", [1, 11, 12, 13, 100])
def test_a_nested_copy_has_the_rows_of_the_tensor(rows: int) -> None:
    tensor = base(rows, 8)
    copy, buffer = nested_copy(tensor)
    assert torch.equal(read(copy, rows, 8), tensor)
    assert torch.equal(copied_back(buffer, rows), tensor)


@pytest.mark.parametrize("place", ["row", "before", "behind"])
def test_what_is_written_to_a_nested_copy_shows_in_what_comes_back(place: str) -> None:
    tensor = base(11, 8)
    copy, buffer = nested_copy(tensor)
    flat = torch.as_strided(buffer, (buffer.numel(),), (1,), 0)
    start = copy.tensor.storage_offset()
    flat[{"row": start, "before": start - 1, "behind": len(flat) - 1}[place]] = -1.0
    back = copied_back(buffer, 11)
    assert not torch.equal(back, tensor)
    assert bool(back.isnan().all()) == (place != "row")


def test_a_kernel_is_told_the_layout_by_the_names_of_its_parameters() -> None:
    assert rows_of(base(6, 10)[:, :8]).arguments("x") == {"x_row_stride": 10}
    assert rows_of(base(2, 4, 5, 8).transpose(1, 2)).arguments("dy") == {
        "dy_middle": 5,
        "dy_inner": 4,
        "dy_outer_stride": 160,
        "dy_middle_stride": 8,
        "dy_inner_stride": 40,
        "dy_col_stride": 1,
    }
