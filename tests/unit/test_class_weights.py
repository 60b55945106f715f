import numpy as np
import pytest
from mpi4py import MPI

from mpitrain.collectives.base import Transport
from mpitrain.comm.grid import ProcessGrid
from mpitrain.config.load import resolve
from mpitrain.parallel.tensor import TensorParallel
from mpitrain.partition import GridShape
from mpitrain.train.build import build
from mpitrain.train.loss import TaskLoss

SMALL = {"model": {"kind": "mlp", "hidden": [4]}, "data": {"samples": 200, "test_samples": 10, "window": 4}}


@pytest.fixture
def grid():
    with ProcessGrid(MPI.COMM_SELF, GridShape(1)) as grid:
        yield grid


def test_balanced_classes_have_equal_parts_and_mean_one(grid):
    config = resolve({**SMALL, "train": {"class_weights": "balanced"}}, "test", []).config
    parts = build(config, grid)
    labels = parts.dataset.train(np.arange(200)).y
    counts = np.bincount(labels, minlength=parts.dataset.num_outputs)
    present = counts > 0
    assert np.allclose((parts.loss.class_weights * counts)[present], 200 / present.sum())
    assert np.isclose(parts.loss.class_weights[labels].mean(), 1)


def test_equal_classes_need_no_weights(grid):
    assert build(resolve(dict(SMALL), "test", []).config, grid).loss.class_weights is None


def test_gradients_carry_the_weights(grid):
    logits, labels = np.array([[0.3, -0.2], [0.1, 0.4]]), np.array([0, 1])
    split = TensorParallel(grid.tensor, Transport())
    plain = TaskLoss("classify", split, 0)(logits, labels, 2)
    weighted = TaskLoss("classify", split, 0, class_weights=np.array([3.0, 0.5]))(logits, labels, 2)
    assert np.allclose(weighted.dout, plain.dout * np.array([[3.0], [0.5]]))
