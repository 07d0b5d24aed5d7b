import pytest
import torch

from gpu_worker.execution.batch.block_tables import BlockTables
from gpu_worker.execution.batch.transfers import Upload

DEVICE = torch.device("cpu")


@pytest.fixture
def tables() -> BlockTables:
    return BlockTables(3, 4, DEVICE)


def follow(tables: BlockTables, rows: list[int], blocks: list[list[int]]) -> None:
    upload = Upload(DEVICE)
    tables.follow(rows, blocks, upload)
    upload.send()


def test_tables_that_grow_are_written_from_where_they_grew(tables: BlockTables) -> None:
    table = [5, 7]
    follow(tables, [1], [table])
    # What is known is not written again: only a new list may change it.
    table[0] = 99
    table.append(3)
    follow(tables, [1], [table])
    assert tables.device.tolist() == [[0] * 4, [5, 7, 3, 0], [0] * 4]


def test_new_list_is_written_from_its_beginning(tables: BlockTables) -> None:
    follow(tables, [0, 2], [[5, 7, 9], [1]])
    follow(tables, [0, 2], [[6], [1, 2]])
    assert tables.device.tolist()[0][:1] == [6]
    assert tables.device.tolist()[2] == [1, 2, 0, 0]


def test_next_sequence_of_a_row_is_written_even_if_its_list_is_the_same(tables: BlockTables) -> None:
    table = [5, 7]
    follow(tables, [1], [table])
    tables.host[1] = 0
    tables.forget(1)
    follow(tables, [1], [table])
    assert tables.device.tolist()[1] == [5, 7, 0, 0]


def test_tables_of_a_step_are_in_the_order_of_its_rows(tables: BlockTables) -> None:
    follow(tables, [0, 1, 2], [[5], [6, 8], [7]])
    chosen = tables.of(torch.tensor([2, 1]))
    assert chosen.tolist() == [[7, 0, 0, 0], [6, 8, 0, 0]]
    assert chosen.is_contiguous()
