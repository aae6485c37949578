"""The attentive neural process: a network that predicts new rows from a few known ones, its context.

Kim, Mnih, Schwarz, Garnelo, Eslami, Rosenbaum, Vinyals & Teh, "Attentive Neural Processes", ICLR 2019. `Network` is
figure 2 of this paper without self-attention. `_negative_elbo` is the negative of eq. 3 divided by the number of
targets. The initial values are from the authors' code (https://github.com/google-deepmind/neural-processes).

The sizes and `preset="paper"` are from RIO's Table 1: Qiu, Meyerson & Miikkulainen, "Quantifying Point-Prediction
Uncertainty in Neural Networks via Residual Estimation with an I/O Kernel", ICLR 2020, appendix D.1.
"""

import math
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypedDict, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray

from jaxcal import _checks, _programs, _random
from jaxcal._numpy import AnyArray, bucket, can_be_filled, filled, numpy_or_jit
from jaxcal.distributions import Mixture, Normal
from jaxcal.distributions._rows import predicted_by_buckets
from jaxcal.frames.columns import Categorical, Columns, as_data
from jaxcal.frames.layout import Series, Table
from jaxcal.frames.preprocessing import Standardizer
from jaxcal.functional import normal
from jaxcal.networks import FeedForward, TrainingRecord, presets
from jaxcal.networks.training import TAKE_ANOTHER, check_names
from jaxcal.optimize import num_train, train_steps

# Rows of functions: inputs [f, n, d] and targets [f, n].
XY = tuple[Float[AnyArray, "_ _ d"], Float[AnyArray, "_ _"]]

_HEADS = 8
# The context has at most this fraction of the rows that are drawn for a step, and all drawn rows are targets.
_CONTEXT_FRACTION = 0.8
_LEAST_CONTEXT = 3
# The bounds of the std of the latents.
_LEAST_LATENT_STD, _MOST_LATENT_STD = 0.1, 1.0
# The number of steps between two checks of the validation loss.
_STEPS = 100
# The most rows of the context that predictions are made from.
_MOST_KEPT = 1000


class NeuralProcessOptions(TypedDict, total=False):
    """The options of the training; an option that is None has its default.

    Attributes:
        learning_rate: of Adam (default 1e-3; 1e-4 with the preset).
        batch_size: contexts a step (default 16).
        max_iterations: the most steps of Adam (default 10,000; 2000 with the preset). A number above one hundred is
            rounded up to hundreds.
        patience: training stops after this many hundreds of steps without improvement (default 20).
        validation_fraction: fraction of the rows, or of the functions, in the validation set (default 0.2); the preset
            has none.
        throw: whether to raise if training diverges (default True); the module's `training.result` says so in any case.
    """

    learning_rate: ArrayLike | None
    batch_size: int | None
    max_iterations: int | None
    patience: int | None
    validation_fraction: float | None
    throw: bool | None


def fit(
    x: "Table",
    y: "Series",
    *,
    key: "PRNGKeyArray",
    categorical: "Categorical" = (),
    max_context: int = 50,
    num_samples: int | None = 20,
    width: int = 64,
    preset: str | None = None,
    **options: "Unpack[NeuralProcessOptions]",
) -> "NeuralProcess":
    """Train an attentive neural process by Adam, on random contexts out of the rows given.

    A context, some rows (x_i, y_i), says what is known of a function. Its summary is a latent vector z with a normal
    distribution, which a network computes from the mean over the context. At a point x, eight heads of attention pick
    what the nearby rows of the context say. From z, the attention and x comes the normal distribution of y.

    A step of the training draws rows for each of `batch_size` contexts. A random number of them, 3 to `max_context`,
    are the context, and all of them are predicted. The loss is the negative log likelihood, given z from all of the
    rows, plus a divergence. It is the divergence of z's distribution given all of the rows from its distribution given
    the context.

    A random fraction of the rows is the validation set. After every hundred steps it is predicted from `max_context`
    other rows. Training stops when the validation loss has not improved `patience` times in a row, and the weights of
    the best time are kept. Predictions are made from all rows, or from a thousand random ones.

    y of shape [f, n] is a family of f functions. Each context is then from one function, and a fraction of the
    functions is the validation set. The network learns to predict a new function from its context, which every call
    must be given.

    Inputs and target are standardized by the rows given here. So y -> a y + b changes the prediction in exactly this
    way, up to rounding.

    `preset="paper"` is the setting of RIO's Table 1: learning rate 1e-4 and 2000 steps, after which the last weights
    are kept. No std is below a tenth of the target's std, and predictions are made from `max_context` rows. There is no
    validation set and no validation loss. If the network is trained for longer, it memorizes rows and becomes
    overconfident.

    Works under `jit` and, over keys and over tables of equal size, under `eqx.filter_vmap`. Predictions are
    differentiable in x and in the context; a derivative through the training is refused.

    Args:
        x: inputs [n, d], or a data frame (`jaxcal.frames`), or inputs [f, n, d] of several functions; a vector [n] is
            one column.
        y: targets [n], or [f, n] of several functions. A constant target is predicted exactly, with std 0.
        key: random key of the weights, the validation set, the contexts and the latents.
        categorical: the columns of x whose values have no order, by position, or of a data frame by name; only for one
            function.
        max_context: the most rows of a context in training.
        num_samples: a prediction is the mixture over this many values of z, drawn once; None for the normal
            distribution at the mean of z.
        width: units of every hidden layer, and number of latents; a multiple of 8.
        preset: None, or "paper", as above.
        **options: of the training, as `NeuralProcessOptions` lists them.

    Raises:
        TypeError: if key is no random key, or there is no such option.
        ValueError: if x or y is empty, not finite or of the wrong shape, or if there are fewer than four rows (of every
            function). Also if an option is out of its range.
        FloatingPointError: if the loss becomes NaN or infinite, and `throw`.

    Example:
        >>> import jax, numpy as np
        >>> from jaxcal.predictors import neural_process
        >>> x = np.linspace(-1, 1, 40)
        >>> options = {"width": 16, "max_iterations": 60, "learning_rate": 0.01}
        >>> process = neural_process.fit(x, 4 * x + 5, key=jax.random.key(0), **options)
        >>> process(np.array([-0.5, 0.5])).mean.round(0).tolist()
        [3.0, 7.0]
    """
    _checks.check_key(key)
    check_names(fit, options, NeuralProcessOptions)
    settings = presets.settle(presets.NEURAL_PROCESS, preset, **options)
    for name in ("max_iterations", "batch_size", "patience"):
        _checks.check_at_least(name, getattr(settings, name), 1)
    _checks.check_positive("learning_rate", settings.learning_rate)
    _checks.check_at_least("max_context", max_context, 1)
    if num_samples is not None:
        _checks.check_at_least("num_samples", num_samples, 1)
    if width < _HEADS or width % _HEADS:
        raise ValueError(f"width must be a multiple of {_HEADS}, the number of heads; got {width}.")
    columns, x, y = _as_functions(x, y, categorical)
    split_key, init_key, train_key, noise_key = jax.random.split(key, 4)
    indicators = columns.indicators
    fraction, paper = settings.validation_fraction, preset == "paper"
    rows = _split(x, y, fraction, max_context, indicators, split_key, paper=paper)
    network = _initial_network(x.shape[2], width, settings.least_std, rows.train[1].dtype, key=init_key)
    steps = min(_STEPS, settings.max_iterations)
    sizes = _Sizes.of(rows.train[1].shape[1], max_context)
    train, validation, numbers = _in_buckets(rows, train_key)
    optimum = train_steps(
        Partial(_loss, rows=train, numbers=numbers, sizes=sizes, batch_size=settings.batch_size),
        network,
        validation,
        key=train_key,
        learning_rate=settings.learning_rate,
        num_steps=steps,
        max_epochs=-(-settings.max_iterations // steps),
        patience=settings.max_iterations if paper else settings.patience,
        restore_best=not paper,
        what="neural_process.fit",
        instead=TAKE_ANOTHER,
    )
    training = TrainingRecord.of(optimum, throw=settings.throw, validated=rows.validation is not None)
    noise = None if num_samples is None else jax.random.normal(noise_key, (num_samples, width), rows.train[1].dtype)
    return NeuralProcess(
        network=optimum.params,
        context=rows.context,
        noise=noise,
        columns=columns,
        x_scaler=rows.x_scaler,
        y_scaler=rows.y_scaler,
        iterations=optimum.steps * steps,
        training=training,
    )


class Network(eqx.Module):
    """The network that predicts one function from a context, in standardized units.

    Attributes:
        latent_encoder: encodes a row of the context for the latents.
        latent_distribution: maps the mean over the encoded rows to the mean and the spread of the latents.
        encoder: encodes a row of the context for the attention.
        embedding: embeds inputs; the embeddings of a point and of the context's rows are compared.
        attention: weighs the encoded rows that a point attends to.
        decoder: gives the mean and the spread of the target.
        least_std: the least std of the target.
    """

    latent_encoder: FeedForward
    latent_distribution: FeedForward
    encoder: FeedForward
    embedding: FeedForward
    attention: eqx.nn.MultiheadAttention
    decoder: FeedForward
    least_std: float = eqx.field(static=True)

    def __init__(self, in_size: int, width: int, *, key: PRNGKeyArray, least_std: float, dtype: DTypeLike):
        keys = jax.random.split(key, 6)
        network = partial(FeedForward, dtype=dtype)
        self.latent_encoder = network(in_size + 1, (width,) * 3, width, key=keys[0])
        self.latent_distribution = _with_two_outputs(network(width, (width,), 2 * width, key=keys[1]))
        self.encoder = network(in_size + 1, (width,) * 3, width, key=keys[2])
        self.embedding = network(in_size, (width,), width, key=keys[3])
        self.attention = _attention(width, dtype, key=keys[4])
        self.decoder = network(in_size + 2 * width, (width,) * 4, 2, key=keys[5])
        self.least_std = least_std

    @property
    def num_latents(self) -> int:
        """The length of z."""
        return self.latent_distribution.layers[-1].weight.shape[0] // 2

    def summary(
        self, x: Float[Array, "c d"], y: Float[Array, " c"], present: Bool[Array, " c"] | None = None
    ) -> tuple[Float[Array, " latents"], Float[Array, " latents"]]:
        """The mean and the std of the latents, given the rows of a context that are present, or all rows."""
        rows = jax.vmap(self.latent_encoder)(jnp.column_stack([x, y]))
        where = None if present is None else present[:, None]
        mean, spread = jnp.split(self.latent_distribution(jnp.mean(rows, axis=0, where=where)), 2)
        # std = 0.1 + 0.9 sigmoid(spread)
        return mean, _LEAST_LATENT_STD + (_MOST_LATENT_STD - _LEAST_LATENT_STD) * jax.nn.sigmoid(spread)

    def seen(
        self,
        x: Float[Array, "n d"],
        context_x: Float[Array, "c d"],
        context_y: Float[Array, " c"],
        present: Bool[Array, " c"] | None = None,
    ) -> Float[Array, "n width"]:
        """The output of the attention at every point, from the rows of the context that are present, or all rows."""
        keys, queries = jax.vmap(self.embedding)(context_x), jax.vmap(self.embedding)(x)
        values = jax.vmap(self.encoder)(jnp.column_stack([context_x, context_y]))
        mask = None if present is None else jnp.broadcast_to(present, (x.shape[0], present.shape[0]))
        return self.attention(queries, keys, values, mask)

    def decode(
        self, x: Float[Array, "n d"], seen: Float[Array, "n width"], latents: Float[Array, " latents"]
    ) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
        """The mean and the std of the target at every point."""
        mean, spread = jax.vmap(lambda x, seen: self.decoder(jnp.concatenate([x, seen, latents])))(x, seen).T
        # std = least + (1 - least) softplus(spread)
        return mean, self.least_std + (1 - self.least_std) * jax.nn.softplus(spread)


class NeuralProcess(eqx.Module):
    """A trained neural process; made by `fit`.

    Attributes:
        network: the weights.
        context: standardized rows (x, y) that predictions are made from where a call gives none. None after a training
            on several functions.
        noise: standard normal values of the latents, one row for each member of the mixture; None for the normal
            distribution.
        columns: what the columns of the training inputs were.
        x_scaler: the standardization of the inputs.
        y_scaler: the standardization of the target.
        iterations: number of steps that were taken.
        training: how training went, a `jaxcal.networks.TrainingRecord`. An epoch is a hundred steps. The loss is the
            negative log likelihood with the latents at their mean.
    """

    network: Network
    context: tuple[Float[Array, "*runs c d"], Float[Array, "*runs c"]] | None
    noise: Float[Array, "*runs samples latents"] | None
    columns: Columns
    x_scaler: Standardizer
    y_scaler: Standardizer
    iterations: Int[Array, "*runs"]
    training: TrainingRecord

    def __call__(self, x: Table, *, context: tuple[Table, ArrayLike] | None = None) -> Normal | Mixture:
        """The predictions at the rows of x; a row's prediction does not depend on the other rows.

        Args:
            x: inputs [n, d], or a data frame, as `Columns.table` takes them; a vector [n] is one column.
            context: the known rows ([c, d], [c]) of the function, in any order; None for the rows of `fit`.

        Raises:
            ValueError: if x or the context is empty, not finite, or has other columns than the training inputs. Also if
                there is no context.
        """
        x = self.columns(x)
        if context is not None:
            context_x, context_y = self.columns(context[0]), _checks.as_vector("context[1]", context[1])
            _checks.check_length("context[0]", context_x, context_y.shape[0])
            _checks.check_rows("context[0]", context_x, 1)
            known = self.x_scaler(context_x), self.y_scaler(context_y)
        elif self.context is None:
            raise ValueError("the process was trained on several functions: give the context of the predicted one.")
        else:
            known = self.context
        return _predict(_Informed.of(self, *known), x)


def _as_functions(
    x: Table, y: Series, categorical: Categorical
) -> tuple[Columns, Float[Array, "f n d"], Float[Array, "f n"]]:
    """The columns of the inputs, and checked rows of one function or of several."""
    if np.ndim(y) != 2:
        columns, x, y = as_data(x, y, categorical)
        x, y = _only_function(x, y)
    else:
        y = _checks.as_floats("y", y)
        y, x = _checks.as_matrix("y", y), _checks.as_floats("x", x)
        x = x[..., None] if x.shape == y.shape else x
        if x.ndim != 3 or x.shape[:2] != y.shape or not x.shape[2]:
            raise ValueError(f"x must have shape (f, n, d) with y of shape (f, n) = {y.shape}; got {x.shape}.")
        _checks.check_finite("x", x)
        if categorical:
            raise ValueError("categorical columns are for one function: x has several functions.")
        columns = Columns.of(x)
    _checks.check_at_least("the number of rows of a function", y.shape[1], _LEAST_CONTEXT + 1)
    return columns, x, y


@numpy_or_jit
def _only_function(x: Float[AnyArray, "n d"], y: Float[AnyArray, " n"]) -> XY:
    return x[None], y[None]


class _Sizes(NamedTuple):
    """The number of rows that are drawn for a context and its targets, and the most of them in the context."""

    num_rows: int
    most: int

    @classmethod
    def of(cls, n: int, max_context: int) -> "_Sizes":
        # max_context / 0.8 + 1 rows are drawn if there are as many; at least one of them is not in the context.
        num_rows = min(n, round(max_context / _CONTEXT_FRACTION) + 1)
        return cls(num_rows, min(max_context, num_rows - 1))


class _Question(NamedTuple):
    """A context, and rows to predict from it."""

    context_x: Float[AnyArray, "*f c d"]
    context_y: Float[AnyArray, "*f c"]
    x: Float[AnyArray, "*f n d"]
    y: Float[AnyArray, "*f n"]


class _TaskRows(NamedTuple):
    """Standardized rows to train on, to stop by if there are any, and to predict from."""

    train: XY
    validation: _Question | None
    context: tuple[Float[AnyArray, "c d"], Float[AnyArray, " c"]] | None
    x_scaler: Standardizer
    y_scaler: Standardizer


def _split(
    x: Float[Array, "f n d"],
    y: Float[Array, "f n"],
    validation_fraction: float,
    max_context: int,
    indicators: tuple[int, ...],
    key: PRNGKeyArray,
    *,
    paper: bool,
) -> _TaskRows:
    """The rows in random order; the preset trains on all of them."""
    order = _random.permutation(key, y.shape[1])
    return _divided(x, y, order, None if paper else validation_fraction, max_context, indicators)


@numpy_or_jit
def _divided(
    x: Float[AnyArray, "f n d"],
    y: Float[AnyArray, "f n"],
    order: Int[AnyArray, " n"],
    validation_fraction: float | None,
    max_context: int,
    indicators: tuple[int, ...],
) -> _TaskRows:
    """The rows in the given order; without a validation fraction, all of them are trained on."""
    dtype = np.result_type(x.dtype, y.dtype)
    inputs, targets = x.astype(dtype).reshape(-1, x.shape[2]), y.astype(dtype).ravel()
    x_scaler, y_scaler = Standardizer.of(inputs).without(indicators), Standardizer.of(targets)
    x, y = x_scaler(inputs).reshape(x.shape)[:, order], y_scaler(targets).reshape(y.shape)[:, order]
    train, validation, most = (x, y), None, max_context
    if validation_fraction is not None:
        (train, validation), most = _held_out(x, y, validation_fraction, max_context), _MOST_KEPT
    context = (x[0, :most], y[0, :most]) if y.shape[0] == 1 else None
    return _TaskRows(train=train, validation=validation, context=context, x_scaler=x_scaler, y_scaler=y_scaler)


def _held_out(
    x: Float[AnyArray, "f n d"], y: Float[AnyArray, "f n"], validation_fraction: float, max_context: int
) -> tuple[XY, _Question]:
    """The rows to train on, and the validation set: other functions, or other rows of the only one."""
    f, n = y.shape
    if f > 1:
        kept, known = num_train(f, validation_fraction), min(max_context, n // 2)
        new_x, new_y = x[kept:], y[kept:]
        question = _Question(new_x[:, :known], new_y[:, :known], new_x[:, known:], new_y[:, known:])
        return (x[:kept], y[:kept]), question
    kept = num_train(n, validation_fraction)
    _checks.check_at_least("the number of rows to train on", kept, 2)
    known = min(max_context, kept - 1)
    return (x[:, :kept], y[:, :kept]), _Question(x[:, :known], y[:, :known], x[:, kept:], y[:, kept:])


class _Numbers(NamedTuple):
    """The number of rows of every function; arrays where the rows are padded."""

    train: int | Int[AnyArray, ""]
    validation: int | Int[AnyArray, ""]


def _in_buckets(rows: _TaskRows, key: PRNGKeyArray) -> tuple[XY, _Question | None, _Numbers]:
    """The rows to train on and the validation set, padded where possible: nearby numbers of rows share a program."""
    train, question = rows.train, rows.validation
    numbers = _Numbers(train[1].shape[1], 0 if question is None else question.y.shape[1])
    if not (can_be_filled(train, question, key) and _random.draws_prefixes(key)):
        return train, question, numbers
    longer = lambda part, number: filled(part, bucket(number), axis=1)
    train = longer(train, numbers.train)
    if question is not None:
        x, y = longer((question.x, question.y), numbers.validation)
        question = question._replace(x=x, y=y)
    return train, question, _Numbers(*map(np.int32, numbers))


@_programs.jit
def _initial_network(in_size: int, width: int, least_std: float, dtype: DTypeLike, *, key: PRNGKeyArray) -> Network:
    return Network(in_size, width, least_std=least_std, dtype=dtype, key=key)


def _attention(width: int, dtype: DTypeLike, *, key: PRNGKeyArray) -> eqx.nn.MultiheadAttention:
    """Attention whose four matrices have initial entries from N(0, 1 / width)."""
    attention = eqx.nn.MultiheadAttention(_HEADS, width, dtype=dtype, key=key)
    weights = jax.random.normal(key, (4, width, width), dtype) / math.sqrt(width)
    projections = lambda a: (a.query_proj.weight, a.key_proj.weight, a.value_proj.weight, a.output_proj.weight)
    return eqx.tree_at(projections, attention, tuple(weights))


def _with_two_outputs(network: FeedForward) -> FeedForward:
    """The network, with initial values as of two last layers, one for each half of its outputs."""
    out_size, in_size = network.layers[-1].weight.shape
    # The limits of the two Glorot-uniform distributions, sqrt(6 / (fan_in + fan_out)), have this ratio.
    ratio = math.sqrt((in_size + out_size) / (in_size + out_size // 2))
    return eqx.tree_at(lambda n: n.layers[-1].weight, network, replace_fn=lambda weight: ratio * weight)


def _loss(
    network: Network,
    validation: _Question | None,
    key: PRNGKeyArray | None,
    *,
    rows: XY,
    numbers: _Numbers,
    sizes: _Sizes,
    batch_size: int,
) -> Float[Array, " batch"]:
    """The losses of `batch_size` new contexts, or of the validation set: a loss for `train_steps`.

    Without a validation set, a call without a key uses contexts that are always the same. Their loss shows whether
    training has diverged.
    """
    if validation is not None:
        return jax.vmap(partial(_answer_loss, network, numbers.validation))(validation)
    draw_key, noise_key = jax.random.split(jax.random.key(0) if key is None else key)
    noise = jax.random.normal(noise_key, (batch_size, network.num_latents), rows[1].dtype)
    return jax.vmap(partial(_context_loss, network))(*_draw(rows, numbers.train, sizes, batch_size, draw_key), noise)


def _draw(rows: XY, n: int | Int[Array, ""], sizes: _Sizes, batch_size: int, key: PRNGKeyArray):
    """For each of some contexts, rows (x, y) out of the first n of a function, and how many of them are the context."""
    (f, length), keys = rows[1].shape, jax.random.split(key, 4)
    # All contexts take windows of one random order: drawing it is the most expensive part of a step.
    order = _random.leading(keys[0], length, n)
    first = jax.random.randint(keys[1], (batch_size, 1), 0, n)
    chosen = order[(first + jnp.arange(sizes.num_rows)[None]) % n]
    function = jax.random.randint(keys[2], (batch_size, 1), 0, f)
    num_context = jax.random.randint(keys[3], (batch_size,), min(_LEAST_CONTEXT, sizes.most), sizes.most + 1)
    x, y = jax.tree.map(lambda a: a[function, chosen], rows)
    return x, y, num_context


def _context_loss(network: Network, x, y, num_context, noise: Float[Array, " latents"]) -> Float[Array, ""]:
    """The negative ELBO of one context, the first `num_context` rows; all rows are targets."""
    present = jnp.arange(y.shape[0]) < num_context
    prior, posterior = network.summary(x, y, present), network.summary(x, y)
    mean, std = posterior
    # z = mean + std * noise is a draw from q(z | targets)
    predicted = network.decode(x, network.seen(x, x, y, present), mean + std * noise)
    return _negative_elbo(y, predicted, posterior, prior)


def _negative_elbo(
    y: Float[Array, " n"],
    predicted: tuple[Float[Array, " n"], Float[Array, " n"]],
    posterior: tuple[Float[Array, " latents"], Float[Array, " latents"]],
    prior: tuple[Float[Array, " latents"], Float[Array, " latents"]],
) -> Float[Array, ""]:
    """The negative evidence lower bound (eq. 3) over the number n of targets; the expectation is estimated at one z.

        -(sum_i log N(y_i; mean_i, std_i^2) - KL(q(z | targets) || q(z | context))) / n.

    Args:
        y: the targets.
        predicted: mean and std of every target given a z from `posterior`.
        posterior: mean and std of the normal distribution q(z | targets).
        prior: mean and std of the normal distribution q(z | context).
    """
    (mean, std), (prior_mean, prior_std) = posterior, prior
    ratio = std / prior_std
    # KL(N(m, s^2) || N(m0, s0^2)) = sum((s / s0)^2 + ((m - m0) / s0)^2 - 1 - 2 log(s / s0)) / 2
    divergence = jnp.sum(ratio**2 + ((mean - prior_mean) / prior_std) ** 2 - 1 - 2 * jnp.log(ratio)) / 2
    return divergence / y.shape[0] - jnp.mean(normal.log_prob(y, *predicted))


def _answer_loss(network: Network, number: int | Int[Array, ""], question: _Question) -> Float[Array, ""]:
    """The mean negative log likelihood of the first `number` rows, predicted from a context.

    The latents are at their mean.
    """
    latents, _ = network.summary(question.context_x, question.context_y)
    seen = network.seen(question.x, question.context_x, question.context_y)
    log_prob = normal.log_prob(question.y, *network.decode(question.x, seen, latents))
    return -jnp.mean(log_prob, where=jnp.arange(log_prob.size) < number)


class _Informed(NamedTuple):
    """A process without its own context, and a context whose rows are `present`, or all present where that is None."""

    process: NeuralProcess
    context: tuple[Float[Array, "c d"], Float[Array, " c"]]
    present: Bool[AnyArray, " c"] | None

    @classmethod
    def of(cls, process: NeuralProcess, x: Float[Array, "c d"], y: Float[Array, " c"]) -> "_Informed":
        """The process and these rows, which are padded where possible."""
        process = replace(process, context=None)
        if not can_be_filled(process, x, y):
            return cls(process, (x, y), None)
        number, size = len(y), bucket(len(y))
        return cls(process, filled((x, y), size), np.arange(size) < number)


@predicted_by_buckets
@_programs.jit
def _predict(informed: _Informed, x: Float[Array, "n d"]) -> Normal | Mixture:
    process, context, present = informed
    network, scaler = process.network, process.y_scaler
    points = process.x_scaler(x)
    mean, std = network.summary(*context, present)
    seen = network.seen(points, *context, present)

    def distribution(latents):
        mean, std = network.decode(points, seen, latents)
        return Normal(scaler.inverse(mean), scaler.scale * std)

    if process.noise is None:
        return distribution(mean)
    return Mixture(jax.vmap(distribution)(mean[None] + std[None] * process.noise))
