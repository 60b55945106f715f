"""From a configuration to the objects of a run: the only wiring in the package."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Floats, Ints
from mpitrain.codecs.registry import make_codec
from mpitrain.collectives.base import Event, Traffic, Transport, compile_kernels
from mpitrain.collectives.registry import make_reducer
from mpitrain.collectives.segments import segment_elements
from mpitrain.comm.agreement import agree, first_on_node, same_everywhere, sum_arrays
from mpitrain.comm.grid import Axis, ProcessGrid
from mpitrain.config.codec_names import rank_of
from mpitrain.config.schema import Config, DataConfig
from mpitrain.config.validate import factors, micro_batches_of
from mpitrain.data.dataset import Dataset, Moments, combine_moments
from mpitrain.data.loader import Loader
from mpitrain.data.open import open_dataset
from mpitrain.data.problems import shown
from mpitrain.data.sampler import Sampler, split_test
from mpitrain.errors import DataError
from mpitrain.nn.layer import EVALUATE, Chain
from mpitrain.optim.clip import clip_by_norm
from mpitrain.optim.compensation import Compensation
from mpitrain.optim.optimizer import Optimizer, OptimizerState
from mpitrain.optim.outer import OuterNesterov, merge
from mpitrain.parallel.pipeline import Pipeline, PipelineSettings
from mpitrain.parallel.shared import SharedSums, SharedTensors
from mpitrain.parallel.tensor import TensorParallel
from mpitrain.params import Layout, Params, ParamSpec
from mpitrain.server.setting import Setting
from mpitrain.train.buckets import BucketSums, check_rules, float32_ring_bytes, group_of
from mpitrain.train.exchange import Exchange, SyncExchange
from mpitrain.train.local import LocalExchange
from mpitrain.train.loss import TaskLoss
from mpitrain.train.lowrank import LowRankSums, compile_factors
from mpitrain.train.model import Part, input_dtype, make_part, make_small_model
from mpitrain.train.outer import GlobalWeights
from mpitrain.train.served import owned_layout, setting_of
from mpitrain.train.serving import ServerExchange, WorkerExchange
from mpitrain.train.signal import compile_signal, make_signal
from mpitrain.train.weights import Weights, make_optimizer, make_weights


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
    """Everything that a run is made of, on this rank.

    Attributes
    ----------
    part, tensor, pipeline, shared, shared_sums
        What the rank holds of the model, and how it meets the rest of it.
    """

    config: Config
    grid: ProcessGrid
    dataset: Dataset
    sampler: Sampler
    loader: Loader
    test_part: Ints
    part: Part
    tensor: TensorParallel
    pipeline: Pipeline
    shared: SharedTensors
    shared_sums: SharedSums
    params: Params
    grads: Params
    exchange: Exchange
    loss: TaskLoss
    learned: Learned

    @property
    def num_parameters(self) -> int:
        """Elements of the whole model."""
        return sum(self.part.sizes.values())

    @property
    def layout(self) -> str:
        """Say in words what memories of codecs depend on: a run resumed with another layout starts them anew."""
        parallel = self.config.parallel
        words = [str(self.grid.shape)]
        if parallel.tp > 1:
            words.append(f"sums={parallel.tensor_codec}" + " sequence" * parallel.sequence)
        if parallel.pp > 1:
            words.append(f"chunks={parallel.chunks} cuts={','.join(map(str, self.part.cuts))}")
            words.append(f"channels={parallel.codec},{parallel.gradient_codec}")
        if parallel.pp > 1 and parallel.memory != "none":
            words.append(f"memory={parallel.memory} reference_mb={parallel.reference_mb:g}")
        return " ".join(words)

    @property
    def fp32_ring_bytes(self) -> float:
        """What this rank would send of its gradients in a step of an uncompressed float32 ring of those that train.

        Without headers; 0 for a rank that serves.
        """
        dp = self.grid.shape.dp
        return float32_ring_bytes(self.params.layout.num_parameters, dp) / dp if self.grid.row < dp else 0.0

    def not_finite(self) -> list[str]:
        """Name the tensors whose gradients on this rank are not finite, after a rejected step."""
        own = [name for name in self.exchange.not_finite() if name not in self.shared.holders]
        return [*own, *self.shared_sums.not_finite()]

    def array_bytes(self) -> dict[str, int]:
        """Account for the arrays that this rank keeps, in bytes; activations at their peak so far."""
        kept = {
            "params_bytes": self.params.flat.nbytes,
            "grads_bytes": self.grads.flat.nbytes,
            **self.exchange.array_bytes(),
            "activations_bytes": self.pipeline.peak_bytes,
        }
        kept["memories_bytes"] += self.pipeline.reference_bytes
        return kept | {"array_bytes": sum(kept.values())}

    def note_events(self, events: list[Event] | None) -> None:
        """Have everything that exchanges note there what it does when; None to note nothing."""
        self.exchange.events = self.pipeline.events = self.tensor.events = self.shared_sums.events = events

    def traffic_inside(self) -> Traffic:
        """Take what this rank has spent within its replica since the last call."""
        spent = self.pipeline.traffic + self.tensor.traffic + self.shared_sums.traffic
        self.pipeline.traffic, self.tensor.traffic, self.shared_sums.traffic = Traffic(), Traffic(), Traffic()
        return spent


def build(
    config: Config, grid: ProcessGrid, learned: Learned | None = None, dtype: npt.DTypeLike = np.float32
) -> Parts:
    """Build a run. Collective over the world of ``grid``.

    Parameters
    ----------
    learned : Learned, optional
        Of the run whose model is to be scored; found in the data where left out.
    dtype : dtype
        float32, or float64 to check gradients.

    Raises
    ------
    DataError, ConfigError
        On all ranks, if the data cannot be read or the configuration does not fit it on any.
    """
    dataset, sampler, test_part = agree(grid.world, lambda: _open_data(config, grid))
    _check_same_data(grid.world, dataset)
    known = learned or _learn(dataset, grid, config.data)
    agree(grid.world, lambda: _take_over(dataset, known, config.data))
    optimizer = make_optimizer(config)
    first_on_node(grid.world, lambda: _compile(config, optimizer, dataset))
    transport = Transport(config.network.peer_timeout_s, int(config.network.max_message_mb * 1e6))
    parallel = config.parallel
    tensor = TensorParallel(grid.tensor, transport, parallel.tensor_codec, sequence=parallel.sequence, dtype=dtype)
    part = agree(grid.world, lambda: make_part(config, dataset, grid.shape, grid.world.rank, tensor))
    specs = Chain(part.chunks).specs()
    shared = SharedTensors(grid, specs)
    layout = Layout(specs, group_of(config.exchange, shared.holders))
    setting = agree(grid.world, lambda: setting_of(config, layout, shared, grid, dtype)) if grid.apart else None
    params = Params(owned_layout(setting, grid) if setting and grid.serves else layout, dtype)
    grads = params.zeros_like()
    weights = make_weights(config, params, grads, shared, grid.replica)
    agree(grid.world, lambda: check_rules(part.sizes, config.exchange))
    model = config.model
    class_weights = _class_weights(config, dataset, sampler, grid)
    return Parts(
        config=config,
        grid=grid,
        dataset=dataset,
        sampler=sampler,
        loader=Loader(dataset, sampler, steps=config.train.steps, readers=config.data.readers),
        test_part=test_part,
        part=part,
        tensor=tensor,
        pipeline=_pipeline(config, grid.pipeline, part, transport, num_samples=len(sampler.owned), dtype=dtype),
        shared=shared,
        shared_sums=SharedSums(shared, grads, transport),
        params=params,
        grads=grads,
        exchange=make_exchange(config, grid, weights, transport, shared, setting),
        loss=TaskLoss(model.task, tensor, dataset.num_outputs, model.label_smoothing, class_weights),
        learned=known,
    )


def make_exchange(
    config: Config,
    grid: ProcessGrid,
    weights: Weights,
    transport: Transport,
    shared: SharedTensors,
    setting: Setting | None,
) -> Exchange:
    """Build what moves the weights of this rank, as ``exchange.when`` says; ``setting``: of its column's servers."""
    if setting and grid.serves:
        return ServerExchange(weights, config, grid, setting, transport, shared)
    if setting:
        weights.state = OptimizerState({})  # the servers have it
        return WorkerExchange(weights, config, grid, setting, transport)
    exchange, seed = config.exchange, config.train.seed
    transport = replace(transport, segment=segment_elements(exchange.segment_kb))
    reducer = make_reducer(exchange.collective, grid.data, transport, servers=grid.shape.servers)
    if exchange.when == "local":
        common = agree(
            grid.world,
            lambda: GlobalWeights(
                reducer, weights.params, exchange, seed=seed, shared=shared.holders, replica=grid.replica
            ),
        )
        return LocalExchange(weights, common, config.train.steps, max_rejected=config.train.max_skips)
    kind = LowRankSums if factors(exchange) else BucketSums
    sums = kind(reducer, weights.grads, exchange, seed=seed, shared=shared.holders, steps=config.train.steps)
    return SyncExchange(weights, sums, make_signal(config, weights, grid.shape.dp), overlap=exchange.overlap)


def _pipeline(
    config: Config, axis: Axis, part: Part, transport: Transport, *, num_samples: int, dtype: npt.DTypeLike
) -> Pipeline:
    parallel = config.parallel
    settings = PipelineSettings(
        schedule=parallel.schedule,
        micro_batches=micro_batches_of(parallel, axis.size),
        codec=parallel.codec,
        gradient_codec=parallel.gradient_codec or parallel.codec,
        memory=parallel.memory,
        reference_bytes=int(parallel.reference_mb * 1e6),
        num_samples=num_samples,
    )
    return Pipeline(axis, part.chunks, settings, cut_shapes=part.cut_shapes, transport=transport, dtype=dtype)


def _open_data(config: Config, grid: ProcessGrid) -> tuple[Dataset, Sampler, Ints]:
    dataset = open_dataset(config.data, config.model.task, config.train.seed)
    sampler = Sampler(
        dataset.train_group_sizes,
        config.train.batch_size,
        ranks=grid.shape.dp,
        rank=grid.row,
        placement=config.data.placement,
        seed=config.train.seed,
    )
    test_part = split_test(dataset.num_test, grid.shape.dp, grid.row)
    dataset.load(sampler.owned, test_part)
    return dataset, sampler, test_part


def _check_same_data(world: Axis, dataset: Dataset) -> None:
    names: list[object] = [dataset.feature_names, dataset.class_names, dataset.content]
    shape = [dataset.train_group_sizes, dataset.num_test, *names]
    same_everywhere(world, shape, "the data sets (training groups, test samples, features, classes, values)")


def _learn(dataset: Dataset, grid: ProcessGrid, data: DataConfig) -> Learned:
    """Find the mean and scale of the columns over the training samples of all ranks."""
    mean, scale = np.empty(0), np.empty(0)
    if data.standardize and not dataset.vocabulary:
        mean, scale = combine_moments(_of_all_samples(dataset.moments(), grid, data))
    return Learned(dataset.feature_names, dataset.class_names, mean.tolist(), scale.tolist())


def _of_all_samples(mine: Moments, grid: ProcessGrid, data: DataConfig) -> Moments:
    """Sum in place what ranks have found in their samples. Collective: servers, who have none, learn it, too."""
    if data.placement == "shuffled" and grid.row > 0:
        mine[:] = 0  # every replica holds all samples: the first one speaks for them
    sum_arrays(grid.column, mine)
    return mine


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


def _class_weights(config: Config, dataset: Dataset, sampler: Sampler, grid: ProcessGrid) -> Floats | None:
    """Weigh the classes so that each has the same part in the loss and the mean weight of a training sample is 1."""
    if config.train.class_weights == "equal" or config.model.task != "classify":
        return None
    labels = dataset.train(sampler.owned).y
    here = np.bincount(labels, minlength=dataset.num_outputs).astype(np.float64)
    counts = _of_all_samples(here, grid, config.data)
    present = counts > 0
    weights: Floats = np.zeros(len(counts), np.float32)
    weights[present] = counts.sum() / (present.sum() * counts[present])
    return weights


def _streams(config: Config) -> set[tuple[str, str, bool]]:
    """List codec, memory and rounding of everything that travels."""
    exchange, parallel = config.exchange, config.parallel
    random = exchange.rounding == "stochastic"
    memory = str(exchange.memory)
    names = {"fp16", exchange.codec, *(rule.codec for rule in exchange.rule)}
    streams = {(name, "none", False) for name in [exchange.factor_codec] if factors(exchange)}
    if factors(exchange):
        names = {name for name in names if not rank_of(name)} | {exchange.factor_codec}
    streams |= {(name, "none" if name == "raw" else memory, random and name == exchange.codec) for name in names}
    if exchange.when == "server" and exchange.server_codec != "raw":
        streams.add((exchange.server_codec, "delta", False))
    inside = {(parallel.codec, parallel.memory, False), (str(parallel.gradient_codec), "none", False)}
    return streams | inside | {(parallel.tensor_codec, "none", False), ("raw", "none", False)}


def _compile(config: Config, optimizer: Optimizer, dataset: Dataset) -> None:
    """Run every kernel of the run once, on a few elements or one sample."""
    for name, memory, stochastic in sorted(_streams(config)):
        compile_kernels(make_codec(name, stochastic=stochastic), memory)
    params = Params(Layout([ParamSpec("x", (3,), decay=True)]))
    if config.exchange.signal != "gradient":
        compile_signal()
    optimizer.step(params, params.zeros_like(), optimizer.init(params), 0.0)
    if factors(config.exchange):
        compile_factors()
    params.flat[:] = 1
    clip_by_norm(params, 1.0)
    for decay in (None, 0.5):
        compensation = Compensation(strength=1.0, decay=decay)
        squares = compensation.init(params).get("mean_square")
        compensation.correct(
            params.flat, params.flat.copy(), params.flat.copy(), None if squares is None else squares.flat
        )
    OuterNesterov(lr=1.0, momentum=0.0).step(params.flat, params.flat.copy(), params.flat.copy())
    merge(params.flat, params.flat.copy(), 0.5)
    model = make_small_model(config, dataset)
    weights = Params(Layout(model.specs()))
    sample = np.zeros((1, *dataset.input_shape), input_dtype(dataset))
    output, cache = model.forward(weights, sample, EVALUATE)
    model.backward(weights, cache, output, weights.zeros_like())
