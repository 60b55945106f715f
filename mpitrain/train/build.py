"""From a configuration to the objects of a run: the only wiring in the package."""

from dataclasses import dataclass
from math import prod

import numpy as np

from mpitrain.arrays import Floats, Ints
from mpitrain.codecs.base import Codec
from mpitrain.collectives.base import Transport, compile_kernels
from mpitrain.collectives.registry import make_reducer
from mpitrain.comm.agreement import agree, first_on_node, same_everywhere, sum_arrays
from mpitrain.comm.grid import Axis, ProcessGrid
from mpitrain.config.schema import Config, DataConfig, OptimConfig
from mpitrain.data.dataset import Dataset, combine_moments
from mpitrain.data.loader import Loader
from mpitrain.data.open import open_dataset
from mpitrain.data.problems import shown
from mpitrain.data.sampler import Sampler, split_test
from mpitrain.errors import DataError
from mpitrain.nn.layer import EVALUATE, Chain
from mpitrain.nn.models import Mlp, Transformer
from mpitrain.nn.split import WHOLE, TensorSplit
from mpitrain.optim.clip import clip_by_norm
from mpitrain.optim.optimizer import AdamW, Optimizer, OptimizerState, Sgd
from mpitrain.optim.schedule import Schedule
from mpitrain.params import Layout, Params, ParamSpec
from mpitrain.train.exchange import SyncExchange, check_rules, group_of


@dataclass(frozen=True)
class Learned:
    """What a model's inputs and outputs mean: found in the training data, and needed to score the model on any other.

    Attributes
    ----------
    features, classes : list of str
        Names of the columns and of the classes (or the characters of a text), in order.
    mean, scale : list of float
        Of the columns; empty where they are not standardized.
    """

    features: list[str]
    classes: list[str]
    mean: list[float]
    scale: list[float]


@dataclass
class Parts:
    """Everything that a run is made of, on this rank."""

    config: Config
    grid: ProcessGrid
    dataset: Dataset
    sampler: Sampler
    loader: Loader
    test_part: Ints
    class_weights: Floats | None
    model: Chain
    params: Params
    grads: Params
    optimizer: Optimizer
    optimizer_state: OptimizerState
    schedule: Schedule
    exchange: SyncExchange
    learned: Learned


def build(config: Config, grid: ProcessGrid, learned: Learned | None = None) -> Parts:
    """Build a run. Collective over the world of ``grid``.

    Parameters
    ----------
    learned : Learned, optional
        Of the run whose model is to be scored; found in the data where left out.

    Raises
    ------
    DataError, ConfigError
        On all ranks, if the data cannot be read or the configuration does not fit it on any.
    """
    dataset, sampler, test_part = agree(grid.world, lambda: _open_data(config, grid.data))
    names: list[object] = [dataset.feature_names, dataset.class_names, dataset.content]
    shape = [dataset.train_group_sizes, dataset.num_test, *names]
    same_everywhere(grid.world, shape, "the data sets (training groups, test samples, features, classes, values)")
    known = learned or _learn(dataset, grid.data, config.data)
    agree(grid.world, lambda: _take_over(dataset, known, config.data))
    model = make_model(config, dataset)
    agree(grid.world, lambda: check_rules([spec.name for spec in model.specs()], config.exchange))
    params = Params(Layout(model.specs(), group_of(config.exchange)))
    grads = params.zeros_like()
    optimizer = make_optimizer(config.optim)
    transport = Transport(config.network.peer_timeout_s, int(config.network.max_message_mb * 1e6))
    reducer = make_reducer(config.exchange.collective, grid.data, transport)
    exchange = SyncExchange(reducer, grads, config.exchange, seed=config.train.seed)
    first_on_node(grid.world, lambda: _compile(exchange.streams, optimizer, model, dataset))
    optim = config.optim
    return Parts(
        config=config,
        grid=grid,
        dataset=dataset,
        sampler=sampler,
        loader=Loader(dataset, sampler, steps=config.train.steps, readers=config.data.readers),
        test_part=test_part,
        class_weights=_class_weights(config, dataset, sampler, grid.data),
        model=model,
        params=params,
        grads=grads,
        optimizer=optimizer,
        optimizer_state=optimizer.init(params),
        schedule=Schedule(
            kind=optim.schedule,
            lr=optim.lr,
            total_steps=config.train.steps,
            warmup_steps=optim.warmup_steps,
            min_ratio=optim.min_lr_ratio,
        ),
        exchange=exchange,
        learned=known,
    )


def _open_data(config: Config, data_axis: Axis) -> tuple[Dataset, Sampler, Ints]:
    dataset = open_dataset(config.data, config.model.task, config.train.seed)
    sampler = Sampler(
        dataset.train_group_sizes,
        config.train.batch_size,
        ranks=data_axis.size,
        rank=data_axis.rank,
        placement=config.data.placement,
        seed=config.train.seed,
    )
    test_part = split_test(dataset.num_test, data_axis.size, data_axis.rank)
    dataset.load(sampler.owned, test_part)
    return dataset, sampler, test_part


def _learn(dataset: Dataset, axis: Axis, data: DataConfig) -> Learned:
    """Find the mean and scale of the columns over the training samples of all ranks."""
    mean, scale = np.empty(0), np.empty(0)
    if data.standardize and not dataset.vocabulary:
        table = dataset.moments()
        if data.placement == "station":  # else every rank holds all groups
            sum_arrays(axis, table)
        mean, scale = combine_moments(table)
    return Learned(dataset.feature_names, dataset.class_names, mean.tolist(), scale.tolist())


def _take_over(dataset: Dataset, learned: Learned, data: DataConfig) -> None:
    """Give the data the scale and the classes of the model; of these, the last ones may be missing in the data.

    Raises
    ------
    DataError
        The data have other columns or classes than the model was trained on.
    """
    classes = learned.classes[: len(dataset.class_names)]
    for what, here, there in (
        ("columns", dataset.feature_names, learned.features),
        ("classes", dataset.class_names, classes),
    ):
        if here != there:
            raise DataError(
                f'data: "{data.path or data.kind}": the {what} are {shown(here)}, but the model was trained on '
                f"{shown(there)}; give it data of the same kind"
            )
    if learned.classes:
        dataset.class_names, dataset.num_outputs = learned.classes, len(learned.classes)
        dataset.vocabulary = dataset.vocabulary and len(learned.classes)
    if learned.mean:
        dataset.standardize(np.array(learned.mean), np.array(learned.scale), limit=data.clip)


def _class_weights(config: Config, dataset: Dataset, sampler: Sampler, axis: Axis) -> Floats | None:
    """Weigh the classes so that each has the same part in the loss and the mean weight of a training sample is 1."""
    if config.train.class_weights == "equal" or config.model.task != "classify":
        return None
    labels = dataset.train(sampler.owned).y
    counts = np.bincount(labels, minlength=dataset.num_outputs).astype(np.float64)
    if config.data.placement == "station":
        sum_arrays(axis, counts)
    present = counts > 0
    weights: Floats = np.zeros(len(counts), np.float32)
    weights[present] = counts.sum() / (present.sum() * counts[present])
    return weights


def make_model(config: Config, dataset: Dataset, split: TensorSplit = WHOLE) -> Chain:
    """Build the model that fits the data set's windows and outputs, or a tensor rank's part of it."""
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
        tied=model.tied,
        recompute=config.parallel.recompute,
    )


def make_optimizer(optim: OptimConfig) -> Optimizer:
    """Build the optimizer."""
    if optim.kind == "sgd":
        return Sgd(momentum=optim.momentum, nesterov=optim.nesterov, weight_decay=optim.weight_decay)
    return AdamW(beta1=optim.beta1, beta2=optim.beta2, eps=optim.eps, weight_decay=optim.weight_decay)


def _compile(streams: list[tuple[Codec, str]], optimizer: Optimizer, model: Chain, dataset: Dataset) -> None:
    """Run every kernel of the run once, on a few elements or one sample."""
    for codec, memory in {(type(codec), memory): (codec, memory) for codec, memory in streams}.values():
        compile_kernels(codec, memory)
    params = Params(Layout([ParamSpec("x", (3,), decay=True)]))
    optimizer.step(params, params.zeros_like(), optimizer.init(params), 0.0)
    params.flat[:] = 1
    clip_by_norm(params, 1.0)
    weights = Params(Layout(model.specs()))
    sample = np.zeros((1, *dataset.input_shape), np.uint8 if dataset.vocabulary else np.float32)
    output, cache = model.forward(weights, sample, EVALUATE)
    model.backward(weights, cache, output, weights.zeros_like())
