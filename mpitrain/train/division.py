"""Which layers each rank of a replica holds: the same answer on every rank, from the configuration alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from msgspec import structs

from mpitrain.config.schema import Config, ParallelConfig
from mpitrain.config.validate import chunks_of, micro_batches_of
from mpitrain.nn.layer import Chain
from mpitrain.nn.split import TensorSplit
from mpitrain.parallel.cuts import check_cuts, cuts
from mpitrain.parallel.prediction import Replica
from mpitrain.parallel.units import CountingSplit, Unit, measured, units
from mpitrain.partition import GridShape


@dataclass
class Divider:
    """Divides a model over pipeline and tensor axis; exchanges nothing.

    Parameters
    ----------
    config : Config
        With all derived values.
    build : callable
        Builds the part of the model that a split describes.
    input_shape : tuple of int
        Of one sample.
    dtype : dtype
        Of the input.
    measure : bool
        Whether cuts follow measured seconds, which differ from run to run, instead of counted multiply-adds.
    """

    config: Config
    build: Callable[[TensorSplit], Chain]
    input_shape: tuple[int, ...]
    dtype: npt.DTypeLike = np.float32
    measure: bool = False
    _known: dict[tuple[object, ...], list[Unit]] = field(default_factory=dict)

    def units(self, rank: int = 0, tp: int = 1) -> list[Unit]:
        """List the units of a tensor rank, of the whole model by default; ranks with equal shapes share them."""
        split = CountingSplit(rank, tp, sequence=self.config.parallel.sequence)
        chain = self.build(split)
        start, stop = split.bounds(self.input_shape[0])
        key = (tp, stop - start, *(spec.shape for spec in chain.specs()))
        if key not in self._known:
            found = units(chain, self.input_shape, self.dtype, split)
            self._known[key] = self._timed(chain, found, tp) if self.measure else found
        return self._known[key]

    def _timed(self, chain: Chain, found: Sequence[Unit], tp: int) -> list[Unit]:
        """Put seconds for multiply-adds: those of the whole model, since a part cannot run alone."""
        whole = [unit.work for unit in self.units()] if tp > 1 else None
        seconds = whole or measured(chain, found, self.input_shape, self.dtype)
        return [replace(unit, work=spent) for unit, spent in zip(found, seconds, strict=True)]

    def parallel(self, shape: GridShape) -> ParallelConfig:
        """Set the axes in the configuration; cuts that were given for another number of stages go."""
        parallel = self.config.parallel
        given = parallel.cuts if shape.pp == parallel.pp else ()
        return structs.replace(parallel, dp=shape.dp, pp=shape.pp, tp=shape.tp, cuts=given)

    def replica(self, shape: GridShape) -> Replica:
        """Cut the model where the configuration says, or where work and bytes do for the first tensor rank.

        Raises
        ------
        ConfigError
            Fewer units than pieces, cuts that cannot be, or sizes that the tensor axis does not divide.
        """
        parallel = self.parallel(shape)
        chunks = chunks_of(parallel, shape.pp)
        found = [self.units(rank, shape.tp) for rank in range(shape.tp)]
        virtual = shape.pp * chunks
        given = parallel.cuts if shape.pp > 1 else ()
        return Replica(
            units=found,
            cuts=check_cuts(given, found[0], virtual) if given else cuts(found[0], virtual),
            stages=shape.pp,
            chunks=chunks,
            schedule=parallel.schedule,
            micro_batches=micro_batches_of(parallel, shape.pp),
            split_loss=shape.tp > 1 and self.config.model.task == "lm",
        )
