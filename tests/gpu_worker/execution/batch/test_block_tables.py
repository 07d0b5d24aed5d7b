import pytest
import torch

from gpu_worker.core.plan import Written
from gpu_worker.execution.batch.block_tables import BlockTables
from gpu_worker.execution.batch.transfers import Upload

DEVICE = torch.device("cpu")


@pytest.fixture
def tables() -> BlockTables:
    return BlockTables(3, 4, DEVICE)


def write(tables: BlockTables, *written: Written) -> None:
    upload = Upload(DEVICE)
    tables.write(written, upload)
    upload.send()


def test_tables_that_grow_are_written_from_where_they_grew(tables: BlockTables) -> None:
    write(tables, Written(1, 0, [5, 7]))
    write(tables, Written(1, 2, [3]), Written(2, 0, [4]))
    assert tables.device.tolist() == [[0] * 4, [5, 7, 3, 0], [4, 0, 0, 0]]
    assert tables.host.tolist() == tables.device.tolist()


def test_end_of_a_table_is_replaced(tables: BlockTables) -> None:
    write(tables, Written(0, 0, [5, 7, 9]), Written(2, 0, [1]))
    write(tables, Written(0, 1, [6, 8]))
    assert tables.device.tolist()[0] == [5, 6, 8, 0]
    assert tables.device.tolist()[2] == [1, 0, 0, 0]


def test_tables_of_a_step_are_in_the_order_of_its_rows(tables: BlockTables) -> None:
    write(tables, Written(0, 0, [5]), Written(1, 0, [6, 8]), Written(2, 0, [7]))
    chosen = tables.of(torch.tensor([2, 1]))
    assert chosen.tolist() == [[7, 0, 0, 0], [6, 8, 0, 0]]
    assert chosen.is_contiguous()
