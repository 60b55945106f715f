"""From a configuration to the model: whole, and the part of it that this rank holds."""

from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np
import numpy.typing as npt
from msgspec import structs

from mpitrain.config.schema import Config
from mpitrain.data.dataset import Dataset
from mpitrain.nn.layer import Chain
from mpitrain.nn.models import Mlp, Transformer
from mpitrain.nn.split import WHOLE, TensorSplit
from mpitrain.parallel.cuts import cut_shapes, stage_layers
from mpitrain.partition import GridShape
from mpitrain.train.division import Divider


@dataclass(frozen=True)
class Part:
    """What one rank holds of the model.

    Attributes
    ----------
    chunks : list of Chain
        Its pieces, in forward order; one, unless stages are interleaved.
    cuts : list of int
        First units of all pieces of the model but the first.
    cut_shapes : list of tuple of int
        What leaves every piece of the model but the last, of one sample, as this rank would hold it.
    sizes : dict of str to int
        Elements of every tensor of the whole model.
    """

    chunks: list[Chain]
    cuts: list[int]
    cut_shapes: list[tuple[int, ...]]
    sizes: dict[str, int]


def make_model(config: Config, dataset: Dataset, split: TensorSplit = WHOLE) -> Chain:
    """Build the model, or one tensor-parallel part of it, that fits the data set's windows and outputs.

    Raises
    ------
    ConfigError
        Sizes that ``split`` does not divide.
    """
    model = config.model
    if model.kind == "mlp":
        return Mlp(
            inputs=prod(dataset.input_shape),
            hidden=model.hidden,
            outputs=dataset.num_outputs,
            dropout=model.dropout,
            split=split,
        )
    return Transformer(
        task=model.task,
        time=dataset.input_shape[0],
        d_model=model.d_model,
        blocks=model.layers,
        heads=model.heads,
        d_ff=model.d_ff or 4 * model.d_model,
        outputs=dataset.num_outputs,
        features=None if dataset.vocabulary else dataset.input_shape[1],
        vocabulary=dataset.vocabulary or None,
        causal=model.causal,
        dropout=model.dropout,
        split=split,
        tied=model.tied and model.task == "lm",
        recompute=config.parallel.recompute,
    )


def make_small_model(config: Config, dataset: Dataset) -> Chain:
    """Build a model of the same kinds of layers that costs next to nothing: what compiles it compiles the real one."""
    model, heads = config.model, 2
    small = structs.replace(
        model, d_model=2 * heads, heads=heads, d_ff=2, layers=1, hidden=(2,) * len(model.hidden[:2])
    )
    return make_model(structs.replace(config, model=small), dataset)


def input_dtype(dataset: Dataset) -> npt.DTypeLike:
    """Return the type of a model's input: floats, or tokens."""
    return np.min_scalar_type(dataset.vocabulary - 1) if dataset.vocabulary else np.float32


def make_part(config: Config, dataset: Dataset, shape: GridShape, rank: int, split: TensorSplit) -> Part:
    """Build what a rank holds.

    Parameters
    ----------
    rank : int
        In the world of ``shape``.
    split : TensorSplit
        Of the tensor axis that the rank belongs to.

    Raises
    ------
    ConfigError
        More stages than the model has units, or cuts that do not fit it.
    """
    _, stage, place = shape.coordinates(rank)
    divider = Divider(config, partial(make_model, config, dataset), dataset.input_shape, input_dtype(dataset))
    replica = divider.replica(shape)
    here = replica.units[place]
    pieces = stage_layers(make_model(config, dataset, split), here, replica.cuts, shape.pp, replica.chunks)
    return Part(
        chunks=pieces[stage],
        cuts=list(replica.cuts),
        cut_shapes=cut_shapes(here, replica.cuts),
        sizes={spec.name: spec.size for unit in divider.units() for spec in unit.specs},
    )
