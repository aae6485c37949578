"""Minibatch training with early stopping, L-BFGS, and many runs at once; a whole fit is one compiled loop."""

from jaxcal.optimize.batching import each_run as each_run
from jaxcal.optimize.batching import first_finite as first_finite
from jaxcal.optimize.batching import one_run_at_a_time as one_run_at_a_time
from jaxcal.optimize.batching import over_runs as over_runs
from jaxcal.optimize.implicit import as_constants as as_constants
from jaxcal.optimize.implicit import as_function as as_function
from jaxcal.optimize.lbfgs import descend as descend
from jaxcal.optimize.lbfgs import minimize as minimize
from jaxcal.optimize.lbfgs import minimize_from_each as minimize_from_each
from jaxcal.optimize.minibatch import adam as adam
from jaxcal.optimize.minibatch import keras_rmsprop as keras_rmsprop
from jaxcal.optimize.minibatch import num_train as num_train
from jaxcal.optimize.minibatch import scale_by_adam as scale_by_adam
from jaxcal.optimize.minibatch import train_full_batch as train_full_batch
from jaxcal.optimize.minibatch import train_minibatches as train_minibatches
from jaxcal.optimize.minibatch import train_steps as train_steps
from jaxcal.optimize.minibatch import with_weight_decay as with_weight_decay
from jaxcal.optimize.result import Optimum as Optimum
from jaxcal.optimize.result import Result as Result
from jaxcal.optimize.result import lowest as lowest
from jaxcal.optimize.result import raise_unless_finite as raise_unless_finite
