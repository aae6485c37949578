"""GPflow's side of `rio_vs_gpflow.py`, run by the peers' interpreter: RIO's Gaussian process as its authors ran it."""

import time

import gpflow
import numpy as np
import tensorflow as tf
from rio_vs_gpflow import NUM_INDUCING, SGPR, SVGP, emit, job, time_evaluations, wait_for_start

MODELS = {
    SVGP: lambda data, kernel, points: gpflow.models.SVGP(
        kernel, gpflow.likelihoods.Gaussian(1.0), points, whiten=True
    ),
    SGPR: lambda data, kernel, points: gpflow.models.SGPR(data, kernel, points, noise_variance=1.0),
}


def main() -> None:
    if job()["core"] is not None:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    {"versions": versions, "fits": fits, "bound": bound}[job()["task"]]()


def versions() -> None:
    wait_for_start()
    emit(gpflow=gpflow.__version__, tensorflow=tf.__version__)


def fits() -> None:
    """One record a run: seconds of set-up and of the fit with its prediction, the bound, and the test scores."""
    runs = dict(np.load(job()["file"]))
    fit(runs, job()["runs"][0], max_iterations=1)
    wait_for_start()
    for run in job()["runs"]:
        emit(run=run, **fit(runs, run, job()["max_iterations"]))


def fit(runs: dict, run: int, max_iterations: int) -> dict:
    """A fresh model, fitted and asked for its predictions.

    The set-up is the model's construction and the first evaluation of the loss, in which TensorFlow traces it;
    `minimize` then finds the traced function in the optimizer's cache, where it looks for the same closure and
    variables.
    """
    x, x_test, base, base_test, y, y_test = (
        runs[key][run] for key in ("x", "x_test", "base", "base_test", "y", "y_test")
    )
    points, test_points = standardized(x, base, x), standardized(x, base_test, x_test)
    data = points, (y - base)[:, None]

    began = time.perf_counter()
    model = build(job()["system"], *data)
    loss = model.training_loss_closure(data) if isinstance(model, gpflow.models.SVGP) else model.training_loss_closure()
    optimizer, variables = gpflow.optimizers.Scipy(), model.trainable_variables
    optimizer.eval_func(loss, variables, tf_fun_args={})(optimizer.initial_parameters(variables))
    traced = time.perf_counter()
    optimum = optimizer.minimize(loss, variables, method="L-BFGS-B", options={"maxiter": max_iterations})
    mean, variance = (values.numpy()[:, 0] for values in model.predict_y(test_points))
    ended = time.perf_counter()

    errors = y_test - base_test - mean
    return {
        "set_up": traced - began,
        "seconds": ended - traced,
        "bound": -float(optimum.fun),
        "iterations": int(optimum.nit),
        "rmse": float(np.sqrt(np.mean(errors**2))),
        "nlpd": float(np.mean(0.5 * np.log(2 * np.pi * variance) + 0.5 * errors**2 / variance)),
    }


def build(system: str, points: np.ndarray, targets: np.ndarray) -> gpflow.models.GPModel:
    """The paper's model: two squared-exponential kernels, of the inputs and of the last column, the model's output."""
    columns = points.shape[1]
    kernel = gpflow.kernels.SquaredExponential(active_dims=list(range(columns - 1)))
    kernel += gpflow.kernels.SquaredExponential(active_dims=[columns - 1])
    return MODELS[system]((points, targets), kernel, points[:NUM_INDUCING].copy())


def standardized(train: np.ndarray, base: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The inputs, standardized by the training rows, and the model's output as the last column, as it is."""
    return np.column_stack([(x - train.mean(axis=0)) / train.std(axis=0, ddof=1), base])


def bound() -> None:
    """Seconds of the collapsed bound with its gradient, hyperparameters and inducing points all trained."""
    rows = dict(np.load(job()["file"]))
    model = build(SGPR, standardized(rows["x"], rows["base"], rows["x"]), (rows["y"] - rows["base"])[:, None])

    variables = model.trainable_variables
    inducing = [variable is model.inducing_variable.Z.unconstrained_variable for variable in variables].index(True)

    @tf.function
    def value_and_grad():
        with tf.GradientTape() as tape:
            value = model.maximum_log_likelihood_objective()
        return value, tape.gradient(value, variables)

    def evaluate() -> tuple[float, np.ndarray]:
        value, gradients = value_and_grad()
        return float(value), [gradient.numpy() for gradient in gradients][inducing]

    time_evaluations(evaluate)


if __name__ == "__main__":
    main()
