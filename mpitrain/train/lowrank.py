"""Sums of matrices by their factors (PowerSGD; Vogels, Karimireddy, Jaggi, 2019), over any collective.

Every rank has an addend ``M_i = G_i + e_i`` and a common guess ``Q`` of r rows. Two sums make a matrix of rank r:

    P = Σ M_i Qᵀ,  P̂ = orth(P),  R = Σ R_i with R_i = P̂ᵀ M_i,  Ĝ = P̂ R ≈ Σ M_i

The reducers compute sums, not means, so what rank i lost is its own part, ``e_i = M_i - P̂ R_i``: the errors of all
ranks and Ĝ add up to Σ M_i. That holds for every P̂, so nothing is lost by rounding in the first sum, which needs no
memory. What the second one loses by rounding, ``ρ_i`` at the sends of rank i, is handed back to the matrix it belongs
to, ``e_i += P̂ ρ_i``: fed back as a factor it would meet another P̂.

The next guess is ``orth(R)``. Factors travel transposed, ``(r, m)`` and ``(r, n)``: a block of a codec then holds
values of one magnitude.
"""

import sys
import zlib
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import structs

from mpitrain.arrays import Floats
from mpitrain.codecs.memory import DoubleBuffer
from mpitrain.collectives.reducer import Reducer
from mpitrain.config.codec_names import rank_of
from mpitrain.config.schema import ExchangeConfig, RuleConfig
from mpitrain.kernels.orthogonal import add_product, orthonormalize, project_columns, project_rows
from mpitrain.kernels.reduce import count_not_finite, flush
from mpitrain.params import Layout, Params, ParamSpec
from mpitrain.train.buckets import BucketSums, Summed, codec_of, matrix_shape, plan_buckets, travels_raw

ONE_BUCKET_MB = 1e9
"""Of the second factors, which are all there at the same time: one message is enough."""


class Division(NamedTuple):
    """Which buckets of a layout travel as values and which as factors, and the layouts of these.

    Attributes
    ----------
    values, matrices : list of int
        Numbers of buckets.
    specs : list of ParamSpec
        Tensors of ``matrices``.
    left, right : Layout
        Of the factors; tensors keep their names and their order.
    buckets : int
        Buckets of the layout.
    """

    values: list[int]
    matrices: list[int]
    specs: list[ParamSpec]
    left: Layout
    right: Layout
    buckets: int


def divide(layout: Layout, config: ExchangeConfig, shared: Collection[str] = ()) -> Division:
    """Tell the buckets of a layout apart; ``shared`` as in `mpitrain.train.buckets.plan_buckets`."""
    plan = plan_buckets(layout, config.bucket_mb, shared)
    matrices = [number for number, segments in enumerate(plan) if rank_of(codec_of(segments[0].spec, config))]
    members = {segment.spec.name for number in matrices for segment in plan[number]}
    specs = [spec for spec in layout.specs if spec.name in members]

    def of_segment(spec: ParamSpec) -> str:
        return layout.segments[spec.name].group

    ranks = [rank_of(codec_of(spec, config)) or 0 for spec in specs]
    sizes = [matrix_shape(spec.shape) for spec in specs]
    left = [ParamSpec(spec.name, (r, m)) for spec, r, (m, _) in zip(specs, ranks, sizes, strict=True)]
    right = [ParamSpec(spec.name, (r, n)) for spec, r, (_, n) in zip(specs, ranks, sizes, strict=True)]
    values = [number for number in range(len(plan)) if number not in matrices]
    return Division(values, matrices, specs, Layout(left, of_segment), Layout(right, of_segment), len(plan))


def left_config(config: ExchangeConfig) -> ExchangeConfig:
    """Say how the first factors travel: their rounding costs a little of the fit and nothing of the sum."""
    rules = (RuleConfig(match="*", codec=config.factor_codec),)
    return structs.replace(config, codec=config.factor_codec, memory="none", rule=rules)


def right_config(config: ExchangeConfig) -> ExchangeConfig:
    """Say how the second factors travel; with a residual their reducer tells what its sends have lost."""
    return structs.replace(left_config(config), memory=config.memory, bucket_mb=ONE_BUCKET_MB)


def uncompressed_config(config: ExchangeConfig) -> ExchangeConfig:
    """Say how whole matrices travel in the steps in which everything travels raw."""
    return structs.replace(config, codec="raw", memory="none", rule=(), warmup_steps=0, raw_last_steps=0)


def memory_nbytes(division: Division, config: ExchangeConfig, itemsize: int) -> int:
    """Count what a rank remembers of matrices from step to step, both halves, beside the memories of its reducers."""
    guesses = sum(spec.size for spec in division.right.specs)
    residuals = sum(spec.size for spec in division.specs) if config.memory == "residual" else 0
    return 2 * (guesses + residuals) * itemsize


class Factored:
    """A matrix of this rank on its way to a sum of rank r.

    Parameters
    ----------
    grad : (m, n) array
        This rank's addend; replaced by the sum.
    left, right : (r, m) and (r, n) array
        Its factors, summed by others between the calls.
    seed, name
        Of the first guess, the same on all ranks.
    residual : bool
        Whether what is lost is remembered.

    Attributes
    ----------
    guess, residual : DoubleBuffer
        The rows Q, the same on all ranks, and what this rank has lost.
    """

    def __init__(self, grad: Floats, left: Floats, right: Floats, *, seed: int, name: str, residual: bool) -> None:
        self._grad, self._left, self._right = grad, left, right
        self._one = grad.dtype.type(1)
        rng = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
        self._start: Floats = rng.standard_normal(right.shape).astype(grad.dtype)
        orthonormalize(self._start)
        self.guess = DoubleBuffer(right.size, grad.dtype)
        self.guess.current[:] = self._start.reshape(-1)
        self.residual = DoubleBuffer(grad.size, grad.dtype) if residual else None

    def begin(self) -> None:
        """Make the first factor of the addend and of what earlier steps have lost."""
        matrix = self._addend()
        if self.residual:
            np.add(self._grad, self.residual.current.reshape(matrix.shape), out=matrix)
        project_rows(matrix, self.guess.current.reshape(self._right.shape), self._left)

    def divide(self) -> None:
        """Make the second factor, once the first ones are summed; what it does not hold is lost."""
        matrix = self._addend()
        orthonormalize(self._left)
        project_columns(matrix, self._left, self._right)
        if self.residual:
            add_product(-self._one, self._left, self._right, matrix)
            self.residual.written = True

    def finish(self, lost: Floats) -> None:
        """Make the sum, once the second factors are summed; ``lost``: what the sends of this rank have lost."""
        if self.residual:
            add_product(self._one, self._left, lost, self._addend())
            flush(self.residual.next)
        self._grad[:] = 0
        add_product(self._one, self._left, self._right, self._grad)
        guess = self.guess.next.reshape(self._right.shape)
        guess[:] = self._right
        orthonormalize(guess)
        # A row that came to nothing would remain nothing for ever.
        empty = ~guess.any(axis=1)
        guess[empty] = self._start[empty]
        self.guess.written = True

    def memories(self) -> dict[str, DoubleBuffer]:
        """Name what is kept from step to step."""
        return {"guess": self.guess, **({"residual": self.residual} if self.residual else {})}

    def _addend(self) -> Floats:
        return self.residual.next.reshape(self._grad.shape) if self.residual else self._grad


class LowRankSums:
    """Sums of all tensors of a buffer over an axis: of some by their factors, of the others bucket by bucket.

    Parameters and use are those of `mpitrain.train.buckets.BucketSums`.
    """

    def __init__(
        self,
        reducer: Reducer,
        values: Params,
        config: ExchangeConfig,
        *,
        seed: int,
        shared: Collection[str] = (),
        steps: int = sys.maxsize,
    ) -> None:
        self.reducer = reducer
        self._all, self._config, self._seed, self._shared, self._steps = values, config, seed, shared, steps
        self._step = 0
        self._division = division = divide(values.layout, config, shared)
        self._values = BucketSums(
            reducer, values, config, seed=seed, shared=shared, chosen=division.values, steps=steps
        )
        dtype = values.flat.dtype
        left, right = Params(division.left, dtype), Params(division.right, dtype)
        self._lost = right.zeros_like()
        self._left = BucketSums(
            reducer, left, left_config(config), seed=seed, shared=shared, first=division.buckets, salt="left"
        )
        self._right = BucketSums(
            reducer,
            right,
            right_config(config),
            seed=seed,
            shared=shared,
            first=division.buckets + len(self._left.sizes()),
            salt="right",
        )
        self._uncompressed: BucketSums | None = None
        self._factored = {
            spec.name: Factored(
                values[spec.name].reshape(matrix_shape(spec.shape)),
                left[spec.name],
                right[spec.name],
                seed=seed,
                name=f"{spec.name} {spec.place.start}",
                residual=config.memory == "residual",
            )
            for spec in division.specs
        }

    def begin(self, step: int) -> None:
        """Expect the tensors of a step."""
        self._step = step
        self._values.begin(step)
        if travels_raw(self._config, step, self._steps):
            self._uncompressed = self._uncompressed or self._whole_matrices()
            self._uncompressed.begin(step)
        else:
            self._uncompressed = None
            self._left.begin(step)

    def finished(self, names: Sequence[str]) -> None:
        """Take note that these tensors are final; start what is full now."""
        for name in names:
            if name not in self._factored:
                self._values.finished([name])
            elif self._uncompressed:
                self._uncompressed.finished([name])
            else:
                self._factored[name].begin()
                self._left.finished([name])

    def finish(self) -> Summed:
        """Wait for all sums; raises PeerLostError, ProtocolError, CodecError."""
        matrices = self._uncompressed.finish() if self._uncompressed else self._finish_factors()
        values = self._values.finish()
        return Summed(matrices.finite and values.finite, matrices.traffic + values.traffic)

    def _finish_factors(self) -> Summed:
        """Sum the second factors, unless all ranks know from the first ones that the step means nothing."""
        left = self._left.finish()
        if not left.finite:
            return left
        for factored in self._factored.values():
            factored.divide()
        self._right.start(self._step)
        right = self._right.finish()
        self._right.lost(self._lost.flat)
        self._right.rollback()  # what was lost is told once, and never fed back as a factor
        if right.finite:
            for name, factored in self._factored.items():
                factored.finish(self._lost[name])
        return Summed(right.finite, left.traffic + right.traffic)

    def commit(self) -> None:
        """Make the memories those of this step."""
        self._values.commit()
        for factored in self._factored.values():
            for memory in factored.memories().values():
                memory.commit()
            if factored.residual and self._config.reset_every and self._step % self._config.reset_every == 0:
                factored.residual.current[:] = 0

    def rollback(self) -> None:
        """Forget this step: the memories stay those of the last accepted one."""
        self._values.rollback()
        for factored in self._factored.values():
            for memory in factored.memories().values():
                memory.rollback()

    def not_finite(self) -> list[str]:
        """Name the tensors that are not finite on this rank, after a rejected step."""
        matrices = [name for name in self._factored if count_not_finite(self._all[name].reshape(-1))]
        return [*self._values.not_finite(), *matrices]

    def state(self) -> dict[str, DoubleBuffer]:
        """Name every memory of this rank by its parameter or bucket; a checkpoint keeps the current halves."""
        matrices = {
            f"{name}.{kind}": memory
            for name, factored in self._factored.items()
            for kind, memory in factored.memories().items()
        }
        return self._values.state() | matrices

    def references(self) -> list[DoubleBuffer]:
        """List what is remembered within a step only: what the sends of the second factors lose."""
        return list(self._right.state().values())

    def sizes(self) -> list[int]:
        """List the elements of each bucket, of the factors at the end."""
        return [*self._values.sizes(), *self._left.sizes(), *self._right.sizes()]

    def tensors_by_codec(self) -> dict[str, list[str]]:
        """Name the tensors that each codec serves."""
        return self._values.tensors_by_codec()

    def _whole_matrices(self) -> BucketSums:
        config, chosen = uncompressed_config(self._config), self._division.matrices
        return BucketSums(self.reducer, self._all, config, seed=self._seed, shared=self._shared, chosen=chosen)


def compile_factors() -> None:
    """Run every kernel of a matrix once, on a few elements."""
    grad, left, right = (np.zeros(shape, np.float32) for shape in ((2, 3), (1, 2), (1, 3)))
    factored = Factored(grad, left, right, seed=0, name="x", residual=True)
    factored.begin()
    factored.divide()
    factored.finish(np.zeros_like(right))
