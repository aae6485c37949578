"""Minibatch training with early stopping, L-BFGS, and many runs at once: a whole fit is one compiled loop."""

from jaxcal.optimize.batching import Span, first_finite, one_run_at_a_time, over_runs, reported_runs
from jaxcal.optimize.implicit import as_constants, as_function
from jaxcal.optimize.lbfgs import minimize, minimize_from_each
from jaxcal.optimize.minibatch import (
    adam,
    keras_rmsprop,
    num_train,
    scale_by_adam,
    train_full_batch,
    train_minibatches,
    train_steps,
    with_weight_decay,
)
from jaxcal.optimize.result import Optimum, Result, lowest, raise_unless_finite

__all__ = [
    "Optimum",
    "Result",
    "Span",
    "adam",
    "as_constants",
    "as_function",
    "first_finite",
    "keras_rmsprop",
    "lowest",
    "minimize",
    "minimize_from_each",
    "num_train",
    "one_run_at_a_time",
    "over_runs",
    "raise_unless_finite",
    "reported_runs",
    "scale_by_adam",
    "train_full_batch",
    "train_minibatches",
    "train_steps",
    "with_weight_decay",
]
