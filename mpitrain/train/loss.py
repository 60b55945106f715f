"""The loss that goes with a task."""

from dataclasses import dataclass
from typing import cast

from mpitrain.arrays import Floats, Ints
from mpitrain.config.schema import Task
from mpitrain.data.dataset import NO_TARGET
from mpitrain.nn.loss import LossResult, cross_entropy, squared_error
from mpitrain.parallel.loss import vocab_parallel_cross_entropy
from mpitrain.parallel.tensor import TensorParallel


@dataclass(frozen=True)
class TaskLoss:
    """The loss of a task.

    Attributes
    ----------
    task : str
    split : TensorParallel
        How the outputs of "lm" are split.
    vocabulary : int
        K of "lm".
    label_smoothing : float
        For training only.
    class_weights : (K,) float array or None
        For training only; their mean over the training samples is 1.
    """

    task: Task
    split: TensorParallel
    vocabulary: int
    label_smoothing: float = 0.0
    class_weights: Floats | None = None

    def __call__(self, output: Floats, targets: Floats | Ints, total: float, *, train: bool = True) -> LossResult:
        """Compare outputs with targets; ``total`` is the number of samples of all ranks.

        A sample of tokens counts as many targets as it has steps, so in training none of them may be missing.
        ``total`` stands for the sum of the class weights, too.
        """
        if self.task == "forecast":
            return squared_error(output, cast(Floats, targets), total_weight=total * output.shape[-1])
        labels = cast(Ints, targets)
        if self.task == "lm":
            return self._of_tokens(output, labels, total * output.shape[1])
        smoothing, weights = (self.label_smoothing, self.class_weights) if train else (0.0, None)
        each = None if weights is None else weights[labels]
        return cross_entropy(output, labels, total_weight=total, weights=each, label_smoothing=smoothing)

    def _of_tokens(self, output: Floats, labels: Ints, total: float) -> LossResult:
        is_target = None if labels.min(initial=0) > NO_TARGET else (labels != NO_TARGET).astype(output.dtype)
        return vocab_parallel_cross_entropy(
            output,
            labels,
            total_weight=total,
            weights=is_target,
            split=self.split,
            vocabulary=self.vocabulary,
        )
