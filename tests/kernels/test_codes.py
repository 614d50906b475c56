"""Codes are decoded as documented."""

import torch

from kvcellar.kernels.codes import INT4, Codes


def test_an_order_of_inputs_gives_each_its_own_scale() -> None:
    values = torch.tensor([[1, 2, 3, 4]], dtype=torch.int8)
    codes = Codes(values, None, torch.tensor([[10.0, 100.0]]), torch.tensor([[1.0, 0.0]]), torch.tensor([3, 0, 2, 1]))
    codes.check()
    assert codes.dense().tolist() == [[21.0, 400.0, 300.0, 11.0]]


def test_a_table_gives_the_value_of_each_index() -> None:
    codes = Codes(torch.tensor([[0, 8, 15, 7]], dtype=torch.uint8), INT4, torch.tensor([[0.5]]))
    codes.check()
    assert codes.dense().tolist() == [[-4.0, 0.0, 3.5, -0.5]]
