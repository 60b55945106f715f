"""What every codec does to every tensor of a model in training: to the optimizer's update, and to the loss.

A model is trained on one rank without loss for a while. Then, step by step, the gradient of each tensor is encoded and
decoded by each codec, and the step is judged as if only this tensor had travelled so:

- the *preconditioned update* is g / (sqrt(v) + eps) for AdamW, with the corrected second moment v of this step, and g
  itself for SGD (momentum adds up gradients, the same for all). Its error is that of the decoded gradient in the same
  measure. Where a decoded value is larger than what it stands for, v is what it would be with that value: AdamW never
  moves a weight that has had no gradient by more than that.
- the *loss* is that of fixed test samples after the step, minus the loss after the exact step.

Nothing of this lasts: the training goes on exactly, and codecs have no memory here. What the residual sends later
is not counted as sent.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec import structs

from mpitrain.arrays import Bytes, Floats
from mpitrain.codecs.base import Codec
from mpitrain.codecs.noise import noise_key
from mpitrain.codecs.registry import make_codec
from mpitrain.comm.fault import FaultHook
from mpitrain.comm.grid import ProcessGrid
from mpitrain.comm.runtime import Position
from mpitrain.comm.signals import StopRequest
from mpitrain.config.codec_names import rounds_at_random
from mpitrain.config.schema import Config, ExchangeConfig, ParallelConfig
from mpitrain.errors import ConfigError, DivergedError
from mpitrain.nn.loss import LossResult
from mpitrain.optim.clip import clip_factor
from mpitrain.optim.optimizer import AdamW, OptimizerState
from mpitrain.params import Layout, Params, ParamSpec, Segment
from mpitrain.train.buckets import group_of, plan_buckets, salt_of, stream_of
from mpitrain.train.build import build
from mpitrain.train.console import Narrator
from mpitrain.train.loop import Loop
from mpitrain.train.runfolder import RunFolder
from mpitrain.train.session import named
from mpitrain.train.start import initial_store, known_before
from mpitrain.train.stopping import StopWish


@dataclass(frozen=True)
class Sample:
    """What a codec did in one step.

    Attributes
    ----------
    nbytes : int
        Payload.
    share : float
        Squared error of the preconditioned update, as a share of the whole update's square.
    relative : float
        The same as a share of this tensor's part of the update; NaN where that is zero.
    moved : float
        The squared error times the learning rate's square: by how far weights end elsewhere.
    loss : float
        Change of the loss; NaN where it was not asked for.
    """

    nbytes: int
    share: float
    relative: float
    moved: float
    loss: float = math.nan


@dataclass(frozen=True)
class Effect:
    """Means of several steps, and the standard error of ``loss``; attributes as in `Sample`."""

    nbytes: float
    share: float
    relative: float
    moved: float
    loss: float
    loss_error: float

    @property
    def loss_bound(self) -> float:
        """What the loss may have lost: its mean and two standard errors, and never less than nothing."""
        return max(0.0, self.loss + 2 * self.loss_error)


def effect_of(samples: Sequence[Sample]) -> Effect:
    """Sum up steps; of a single one the standard error is not known (NaN)."""
    columns = {
        name: np.array([getattr(sample, name) for sample in samples], np.float64) for name in Sample.__annotations__
    }
    losses = columns["loss"]
    spread = float(losses.std(ddof=1)) / math.sqrt(len(samples)) if len(samples) > 1 else math.nan
    return Effect(**{name: float(values.mean()) for name, values in columns.items()}, loss_error=spread)


@dataclass(frozen=True)
class _Taken:
    """A step that was taken exactly, and what it began from.

    Attributes
    ----------
    params, buffers
        Copies of the weights, and of what the optimizer remembered, before it.
    lr, factor : float
        Of the step; what clipping multiplied the gradient by.
    square : float
        Of the preconditioned update.
    loss : float
        Of the test samples after it.
    """

    params: Floats
    buffers: Mapping[str, Floats]
    lr: float
    factor: float
    square: float
    loss: float


class Probe:
    """A training on one rank whose steps are looked at.

    Parameters
    ----------
    config : Config
        With all derived values. How it lays out ranks and when it exchanges plays no part.
    grid : ProcessGrid
        Of one rank; owned by the caller.
    steps : int
        That will be taken at most.
    with_loss : bool
        Whether to measure the loss, too: a forward pass on ``train.batch_size`` test samples for everything.

    Attributes
    ----------
    parts : Parts
    step : int
        Steps taken.

    Raises
    ------
    ConfigError, DataError, CheckpointError
    """

    def __init__(self, config: Config, grid: ProcessGrid, *, steps: int, with_loss: bool = True) -> None:
        own = exact_config(config, steps)
        self.parts = build(own, grid, known_before(own, RunFolder(Path(own.run.folder)), grid.world, resumed=False))
        if own.train.init:
            tensors, shards = named("params", self.parts.params)
            initial_store(own.train.init, grid.world).load_tensors(tensors, shards=shards, all_of="params/")
        else:
            self.parts.params.initialize(own.train.seed)
        faults = FaultHook("", grid.world.rank)
        wish = StopWish(StopRequest(), faults, own.run)
        self._loop = Loop(self.parts, wish, Narrator(grid.world.rank, steps), faults, Position())
        self._exchange = config.exchange
        self._with_loss = with_loss
        held_out = self.parts.test_part[: own.train.batch_size]
        self._held_out = self.parts.dataset.test(held_out)

    def close(self) -> None:
        """End the threads that read."""
        self.parts.loader.close()

    @property
    def step(self) -> int:
        """Steps taken."""
        return self._loop.counters.step

    @property
    def num_tested(self) -> int:
        """Test samples whose loss is measured."""
        return len(self._held_out)

    @property
    def segments(self) -> dict[str, Segment]:
        """Tensors by name."""
        return self.parts.params.layout.segments

    def advance(self) -> tuple[float, float | None]:
        """Take a step; returns its learning rate and the norm of its gradient, None where it was skipped."""
        rows, _ = self._loop.round()
        if self._loop.failure:
            raise self._loop.failure
        norm = rows[-1]["grad_norm"]
        return float(str(rows[-1]["lr"])), None if norm is None else float(str(norm))

    def measure(self, candidates: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], Sample]:
        """Take a step, and judge the codecs of every tensor; raises DivergedError, ConfigError where that cannot be."""
        taken = self._take()
        return {
            (name, codec): self._judge(taken, self.segments[name], self._codec(codec))
            for name, codecs in candidates.items()
            for codec in codecs
        }

    def measure_together(self, exchange: ExchangeConfig) -> Sample:
        """Take a step, and judge an exchange as a whole, in its own buckets; raises as above."""
        taken = self._take()
        nbytes, decoded = self._through(exchange, taken.factor)
        errors = [self._squared_error(s, decoded[s.spec.name].ravel()) for s in self.segments.values()]
        square = math.fsum(errors)
        share = square / taken.square
        loss = math.nan
        if self._with_loss:
            loss = self._loss_with(taken, decoded) - taken.loss
        return Sample(nbytes, share, share, taken.lr**2 * square, loss)

    def loss(self) -> float:
        """Return the loss of the test samples that were set aside."""
        samples = self._held_out

        def loss(output: Floats, part: slice) -> LossResult:
            return self.parts.loss(output, samples.y[part], 1.0, train=False)

        sums = self.parts.pipeline.evaluate(self.parts.params, samples.x, len(samples), loss=loss)
        return sums.loss_sum / sums.weight if sums.weight else math.nan

    def _take(self) -> _Taken:
        weights = self.parts.exchange.weights
        params = weights.params.flat.copy()
        buffers = {name: buffer.flat.copy() for name, buffer in weights.state.buffers.items()}
        lr, norm = self.advance()
        if norm is None:
            raise DivergedError(
                f"sensitivity: the gradient of step {self.step} is not finite, so nothing can be measured on it; lower "
                "optim.lr, or measure elsewhere in the training with --steps"
            )
        factor = clip_factor(norm, weights.clip_norm) if weights.clip_norm else 1.0
        square = math.fsum(self._square(segment) for segment in self.segments.values())
        if not square:
            raise ConfigError(
                f"sensitivity: the gradient of step {self.step} is zero, so there is nothing to measure on it"
            )
        return _Taken(params, buffers, lr, factor, square, self.loss() if self._with_loss else math.nan)

    def _codec(self, name: str) -> Codec:
        random = rounds_at_random(name) and self._exchange.rounding == "stochastic"
        return make_codec(name, self.parts.params.flat.dtype, stochastic=random)

    def _judge(self, taken: _Taken, segment: Segment, codec: Codec) -> Sample:
        gradient = self._gradient(segment)
        nbytes, decoded = self._coded(codec, _unclipped(gradient, taken.factor), segment.spec)
        decoded = decoded * gradient.dtype.type(taken.factor)
        error = self._squared_error(segment, decoded)
        own = self._square(segment)
        loss = math.nan
        if self._with_loss:
            loss = self._loss_with(taken, {segment.spec.name: decoded}) - taken.loss
        return Sample(nbytes, error / taken.square, error / own if own else math.nan, taken.lr**2 * error, loss)

    def _gradient(self, segment: Segment) -> Floats:
        """Return the gradient of a tensor as the optimizer has seen it: clipped."""
        return self.parts.grads.flat[segment.start : segment.stop]

    def _coded(self, codec: Codec, values: Floats, spec: ParamSpec) -> tuple[int, Floats]:
        """Send a vector of finite values through a codec, which can carry all of them."""
        wire: Bytes = np.empty(codec.max_nbytes(values.size), np.uint8)
        decoded = np.zeros_like(values)
        key = noise_key(self.parts.config.train.seed, self.step, 0, salt_of(spec))
        nbytes, _ = codec.encode(values, wire, key)
        codec.decode(wire[:nbytes], decoded)
        return nbytes, decoded

    def _through(self, exchange: ExchangeConfig, factor: float) -> tuple[int, dict[str, Floats]]:
        """Send the gradient through the buckets of an exchange, once; returns payload and the clipped result."""
        sent = Params(Layout(self.parts.params.layout.specs, group_of(exchange)), self.parts.grads.flat.dtype)
        for name, gradient in self.parts.grads.items():
            sent[name][...] = _unclipped(gradient, factor)
        total = 0
        for segments in plan_buckets(sent.layout, exchange.bucket_mb):
            values = sent.flat[segments[0].start : segments[-1].stop]
            codec, _ = stream_of(segments[0].spec, exchange, values.dtype)
            nbytes, values[:] = self._coded(codec, values, segments[0].spec)
            total += nbytes
        return total, {name: values * values.dtype.type(factor) for name, values in sent.items()}

    def _square(self, segment: Segment) -> float:
        gradient = self._gradient(segment)
        return _squared(gradient, self._inverse_root(segment, gradient))

    def _squared_error(self, segment: Segment, decoded: Floats) -> float:
        """Return the squared error of the preconditioned update."""
        error = decoded.astype(np.float64) - self._gradient(segment)
        return _squared(error, self._inverse_root(segment, decoded))

    def _inverse_root(self, segment: Segment, decoded: Floats) -> Floats | float:
        """Return what the optimizer multiplies a gradient by, in float64, had it been ``decoded``."""
        weights = self.parts.exchange.weights
        if not isinstance(weights.optimizer, AdamW):
            return 1.0
        optimizer, state = weights.optimizer, weights.state
        exact = self._gradient(segment).astype(np.float64)
        second = state.buffers["second"].flat[segment.start : segment.stop].astype(np.float64)
        second += (1 - optimizer.beta2) * np.maximum(decoded.astype(np.float64) ** 2 - exact**2, 0)
        inverse: Floats = 1 / (np.sqrt(second / (1 - optimizer.beta2**state.step)) + optimizer.eps)
        return inverse

    def _loss_with(self, taken: _Taken, decoded: Mapping[str, Floats]) -> float:
        """Return the loss where these tensors had taken the step with other gradients; all is then as before."""
        params = self.parts.params
        exact = {name: params[name].copy() for name in decoded}
        for name, gradient in decoded.items():
            params[name][...] = self._step_again(taken, self.segments[name], gradient)
        found = self.loss()
        for name, values in exact.items():
            params[name][...] = values
        return found

    def _step_again(self, taken: _Taken, segment: Segment, gradient: Floats) -> Floats:
        """Take the step of one tensor again, with another gradient; returns its weights."""
        weights, place = self.parts.exchange.weights, slice(segment.start, segment.stop)
        params = Params(Layout([segment.spec]), gradient.dtype)
        grads, name = params.zeros_like(), segment.spec.name
        params.flat[:], grads.flat[:] = taken.params[place], gradient.ravel()
        state = OptimizerState({key: params.zeros_like() for key in taken.buffers}, weights.state.step - 1)
        for key, flat in taken.buffers.items():
            state.buffers[key].flat[:] = flat[place]
        weights.optimizer.step(params, grads, state, taken.lr)
        return params[name]


def exact_config(config: Config, steps: int) -> Config:
    """Train the same on one rank, raw, for at least so many steps."""
    return structs.replace(
        config,
        train=structs.replace(config.train, steps=max(steps, config.train.steps)),
        exchange=ExchangeConfig(codec="raw", memory="none", servers=0),
        parallel=ParallelConfig(
            dp=1, micro_batches=1, chunks=1, gradient_codec="raw", recompute=config.parallel.recompute
        ),
    )


def _unclipped(gradient: Floats, factor: float) -> Floats:
    """Return the gradient as ranks send it, before clipping."""
    return gradient / gradient.dtype.type(factor)


def _squared(values: Floats, inverse_root: Floats | float) -> float:
    scaled = values.astype(np.float64) * inverse_root
    return float(np.dot(scaled, scaled))
