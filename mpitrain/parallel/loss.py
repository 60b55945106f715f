"""The cross-entropy of logits that are split over the vocabulary.

Shape suffixes: P ranks of the tensor axis, N targets.
"""

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Floats, Ints
from mpitrain.collectives.base import Traffic
from mpitrain.comm.agreement import NumberGather
from mpitrain.nn.loss import ClassSplit, LossResult, RowStatistics, cross_entropy
from mpitrain.parallel.tensor import TensorParallel
from mpitrain.partition import split_sizes


def vocab_parallel_cross_entropy(
    logits: Floats,
    targets: Ints,
    *,
    total_weight: float,
    weights: Floats | None = None,
    label_smoothing: float = 0.0,
    split: TensorParallel,
    vocabulary: int,
) -> LossResult:
    """Compare this rank's part of the logits with the tokens that were right (Shoeybi et al., 2019).

    One exchange of five float64 a target, never compressed. Collective over the tensor axis.

    Parameters
    ----------
    logits : (B, K) or (B, T, K) float array
        Of this rank's tokens, ``split.bounds(vocabulary)``; untouched.
    targets, total_weight, weights, label_smoothing
        As of `cross_entropy`; the same on all ranks.
    split : TensorParallel
        Notes the exchange in its traffic: the numbers as many times as there are other ranks.
    vocabulary : int
        Tokens of all ranks.

    Returns
    -------
    LossResult
        The sums have the same bits on all ranks; ``dout`` is the gradient by the logits given.

    Raises
    ------
    DataError
        A target of positive weight is not a token; on all ranks.
    """

    def combine(here: RowStatistics) -> RowStatistics:
        numbers = np.concatenate(here).astype(np.float64)
        gathered = NumberGather(split.axis, numbers, timeout_s=split.transport.timeout_s).wait()
        others, nbytes = split.size - 1, numbers.nbytes * (split.size - 1)
        split.traffic += Traffic(sent_bytes=nbytes, received_bytes=nbytes, messages=others)
        return _of_all(gathered.table.reshape(split.size, len(here), len(here.peak)), vocabulary, here.peak.dtype)

    return cross_entropy(
        logits,
        targets,
        total_weight=total_weight,
        weights=weights,
        label_smoothing=label_smoothing,
        split=ClassSplit(split.bounds(vocabulary)[0], vocabulary, combine) if split.size > 1 else None,
    )


def _of_all(table: Floats, vocabulary: int, dtype: npt.DTypeLike) -> RowStatistics:
    """Turn the statistics (P, 5, N) of the ranks' tokens into those of all tokens, in the order of ranks."""
    ranks = min(len(table), vocabulary)  # further ones hold nothing
    peak_PN, best_PN, mass_PN, right_PN, total_PN = table[:ranks].swapaxes(0, 1)
    owner_N = peak_PN.argmax(axis=0)  # of equal ones the first, as in a single row
    shift_PN = peak_PN - peak_PN.max(axis=0)
    held_P1 = np.array(split_sizes(vocabulary, ranks))[:, None]
    columns_N = np.arange(len(owner_N))
    return RowStatistics(
        peak=peak_PN[owner_N, columns_N].astype(dtype),
        best=best_PN[owner_N, columns_N],
        mass=(mass_PN * np.exp(shift_PN)).sum(axis=0).astype(dtype),
        right=(right_PN + shift_PN).max(axis=0).astype(dtype),
        total=(total_PN + held_P1 * shift_PN).sum(axis=0).astype(dtype),
    )
