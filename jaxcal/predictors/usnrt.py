"""USNRT: a tree that splits where the uncertainty differs, with networks of mean and variance in its leaves.

Ma, Yan & Zhang, "Improving Uncertainty Quantification of Variance Networks by Tree-Structured Learning" (2023). At
every node a network is trained, and Levene's test looks among all splits for the one between whose sides the residuals'
spread differs most; if that is significant, the node is split (section IV-B, algorithm 1). In every leaf a variance
network is trained in its alternating form (section IV-D). Several such trees make the ensemble.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxcal import _checks, _random
from jaxcal._numpy import AnyArray, namespace, numpy_or_jit
from jaxcal.distributions import Mixture, Normal
from jaxcal.distributions._rows import predicted_by_buckets
from jaxcal.frames.columns import Categorical, Columns
from jaxcal.frames.layout import Series, Table, check_same_index
from jaxcal.frames.preprocessing import LogTails, Standardizer
from jaxcal.functional._loops import over_leading_axis, scan
from jaxcal.networks import NormalNetwork, TrainingOptions, TrainingRecord, Widening, presets
from jaxcal.networks.held_out import widened
from jaxcal.networks.modules import at_rows
from jaxcal.networks.normal import as_mixture, as_normal
from jaxcal.networks.training import settle, takes_training_options
from jaxcal.predictors import _tree_networks
from jaxcal.predictors._growing import FOLDS, Growing, Problem, Search, arranged, grow, in_unit, stack_trees
from jaxcal.predictors._tree import Branch, Tree
from jaxcal.predictors._tree_networks import Draws


@takes_training_options()
def fit(
    x: Table,
    y: Series,
    *,
    key: PRNGKeyArray,
    categorical: Categorical = (),
    unseen: str = "error",
    num_members: int = 1,
    min_leaf: int | str = "auto",
    significance: float = 0.01,
    center: str | None = None,
    correction: str | None = None,
    step: int | None = None,
    num_folds: int | None = None,
    split_hidden: Sequence[int] | None = None,
    preset: str | None = None,
    **options: Unpack[TrainingOptions],
) -> "USNRT":
    """Grow a tree by Levene's test on residuals, and train networks of mean and variance in its leaves.

    ReLU networks are trained on the squared error, one without each of five folds of the rows. At a node with at least
    2 `min_leaf` rows, all splits of the rows in two are looked at that leave `min_leaf` rows on either side, of a
    continuous column by a threshold or of a categorical one by its categories. The one with the largest |T| of Levene's
    test between the out-of-fold residuals of the sides is found (eq. 5 and 6; `functional.levene`), exactly up to 16
    categories. Where its p-value is at most `significance`, the node is split. In a leaf, ReLU networks for the mean
    and the variance are trained alternately, twice, as in `variance_network`'s alternating form (eq. 7). They start
    from networks of all rows, the variance's trained on the out-of-fold residuals, and stay as these are where their
    loss of the leaf's validation rows is not lower by its standard error: a leaf need not learn from few rows what all
    have in common. The distribution of a row is N(m(x), v(x)) by the networks of its leaf; of several members, their
    mixture.

    All networks are trained as `jaxcal.networks.TrainingOptions` says. The validation set of a leaf are its rows among
    a random fraction of all that no leaf of any member is trained on. By them the variance of every leaf is widened, as
    `variance_network.fit` says, where the rows of all other leaves count as 50 more; and of several members the mixture
    once more. A categorical column enters as indicators of its categories.

    The least of very many p-values is small where nothing differs, too: the paper's rule, which knows nothing of it,
    splits pure noise in 7 of 10 cases, and nearly always if it is skewed and centered by the mean.
    `correction="miller-siegmund"` is a bound for the largest |T|, "permutation" an exact test that permutes the
    residuals, "none" the paper's rule. Of skewed residuals only the median-centered test holds its level.

    A network's residuals on its own training rows are too small, and most so where it bends most: a split may follow
    that in place of the noise. Out-of-fold residuals do not have this, but they have what the networks of the other
    folds cannot fit, which differs from place to place, too: of few rows and little noise more than `significance` of
    the fits are split where the noise is the same everywhere.

    A column of a data frame that is categorical or holds strings is taken as categorical. The fit keeps the names and
    the labels; predictions take a frame, whose columns are looked up by their names, or an array of numbers.

    `preset="paper"` takes center="mean" (eq. 5), correction="none", step=10 and num_folds=1, as in the paper's
    experiments; the authors' code centers at the median. At every node a network of its own is trained (section IV-B),
    and the networks of the leaves start anew. The hidden layers have 8d and 4d units at nodes and 4d and 2d in leaves,
    with tanh for ReLU in the network of the variance, where d is the number of columns; learning rate 0.01, batches of
    64 and patience 25. Every training draws validation rows of its own, and nothing is widened.

    A tree grows by the values of its rows: the fit does not run under `jit` or `vmap`. Predictions do, and are
    differentiable in x within a leaf.

    Args:
        x: inputs [n, d], or a data frame; a vector [n] is one column.
        y: targets [n]. A constant target is predicted exactly, with std 0.
        key: random key of the weights, the validation rows, the batches and the permutations.
        categorical: the columns of x whose values have no order, by position, or of a data frame by name.
        unseen: what a category is that was not there in the fit: an "error", or the "majority" category in its place.
        num_members: how many trees, each with networks of its own.
        min_leaf: the least rows of a leaf; "auto" is a tenth of the rows, or 200 if that is more, with the preset 1000;
            where that is more than half of the rows a warning says that the tree is one leaf.
        significance: the p-value up to which a node is split.
        center: what Levene's test takes deviations from, "median" (the default) or "mean".
        correction: "miller-siegmund" (the default), "permutation" or "none".
        step: only every step-th row of a column's order is a candidate threshold (default 1).
        num_folds: how many folds the rows are divided in for out-of-fold residuals (default 5); with 1 a network is
            trained at every node that is tested, and most of the residuals are of its own training rows.
        split_hidden: widths of the hidden layers of the networks whose residuals are tested (default 64, 64).
        preset: None, or "paper" for other defaults, as above.
        **options: of the training, as `jaxcal.networks.TrainingOptions` describes them; hidden are the widths of both
            networks in a leaf.

    Raises:
        TypeError: if x or y is traced by a transformation of JAX; if key is no random key.
        ValueError: if x or y is empty, not finite or of the wrong shape, there are too few rows to hold some
            out, or an option is out of its range.
        FloatingPointError: if the loss of a leaf becomes NaN or infinite, and `throw`.

    Source: Ma, Yan and Zhang (2023), sections IV and V-A.

    Example:
        >>> import jax, numpy as np
        >>> from jaxcal.predictors import usnrt
        >>> rng = np.random.default_rng(0)
        >>> x = rng.uniform(-1, 1, size=(400, 2))
        >>> y = x[:, 0] + np.where(x[:, 1] > 0.2, 1.0, 0.1) * rng.normal(size=400)
        >>> tree = usnrt.fit(x, y, key=jax.random.key(0), min_leaf=100, max_epochs=20)
        >>> [line.split()[0] for line in tree.text(["a", "b"]).splitlines()]
        ['400', 'b', 'b']
        >>> distribution = tree(np.array([[0.0, -0.5], [0.0, 0.5]]))
        >>> bool(distribution.std[1] > 3 * distribution.std[0])
        True
    """
    _checks.check_key(key)
    if _checks.is_traced(x, y):
        raise TypeError("a tree grows by the values of x and y: fit does not run under jit, vmap or grad.")
    _checks.check_choice("unseen", unseen, ("error", "majority"))
    check_same_index(x, y)
    columns = replace(Columns.of(x, categorical), unseen=unseen)
    table = columns.table(x)
    y = _checks.as_vector("y", y, length=table.shape[0])
    _checks.check_rows("x", table, 2)
    of_paper = presets.usnrt(columns.num_columns)
    leaf = of_paper._replace(hidden=(4 * columns.num_columns, 2 * columns.num_columns), patience=25)
    settings = settle("usnrt.fit", options, {None: presets.DEFAULT, "paper": leaf}, preset)
    _checks.check_at_least("num_members", num_members, 1)
    tests = {"significance": significance, "center": center, "correction": correction, "step": step}
    by = {"num_folds": num_folds, "split_hidden": split_hidden}
    search = Search.of(preset, len(y), columns.num_columns, min_leaf, **tests, **by)
    scalers, problem = arranged(columns, table, y, log_tails=settings.log_tails)
    # As many leaves as there can be at most.
    num_leaves = num_members * max(len(y) // search.min_leaf, 1)
    grow_key, *keys = _random.split(key, 5)
    of_leaves, of_folds, of_held_out, of_all = map(Draws.of, keys)
    splitting = settings._replace(hidden=tuple(search.split_hidden))
    folds = partial(_tree_networks.out_of_fold_residuals, problem, splitting, num_members=num_members, draws=of_folds)
    residuals = None if search.num_folds == 1 else folds(search.num_folds)
    draws = residuals is None or search.correction == "permutation"
    trees = _grow(problem, search, splitting, num_members, grow_key if draws else None, residuals)
    held_out = _tree_networks.held_out_rows(problem, settings, of_held_out)
    start = None
    if held_out is not None:
        residuals = folds(FOLDS) if residuals is None else residuals
        start = _tree_networks.train_on_all_rows(problem, settings, held_out, residuals, of_all)
    rows = [tree.leaves() for tree in trees]
    leaves = _tree_networks.train_leaves(problem, settings, rows, num_leaves, held_out, start, of_leaves)
    fitted = USNRT(
        columns=columns,
        x_scaler=scalers.x,
        y_scaler=scalers.y,
        trees=stack_trees(trees, scalers.y.scale),
        networks=leaves.optima.params,
        leaf_rmse=in_unit(leaves.rmse, scalers.y.scale),
        leaf_coverage=leaves.coverage,
        training=TrainingRecord.of(leaves.optima, throw=settings.throw),
        leaf_widening=leaves.widening,
        widening=None,
    )
    if num_members == 1 or held_out is None:
        return fitted
    rows = np.flatnonzero(held_out)
    widening = _widening_of_mixture(fitted, table[rows], problem.target[rows])
    return replace(fitted, widening=widening)


class USNRT(eqx.Module):
    """A grown tree with the networks of its leaves, or an ensemble of several; made by `fit`.

    Attributes:
        columns: what the columns of the training inputs were.
        x_scaler: the standardization of the inputs of networks.
        y_scaler: the standardization of the target.
        trees: the trees of the members, padded to a common size [m, nodes].
        networks: the networks of the leaves [m, leaves]; of a tree with fewer leaves, the rest are copies of its first.
        leaf_rmse: the root mean square of the training residuals in every leaf [m, leaves], in the unit of y; NaN where
            there is no such leaf.
        leaf_coverage: the fraction of held-out rows in the 90 % intervals of every leaf [m, leaves], as they are after
            the widening, which the same rows decided; NaN where there is no such leaf; None with the preset.
        training: how the training of every leaf's networks went [m, leaves], a `jaxcal.networks.TrainingRecord`.
        leaf_widening: what makes the variance in every leaf [m, leaves] that of new rows; None with the preset.
        widening: what makes the variance of the mixture of several members that of new rows, after this.
    """

    columns: Columns
    x_scaler: Standardizer | LogTails
    y_scaler: Standardizer
    trees: Tree
    networks: NormalNetwork
    leaf_rmse: Float[Array, "m leaves"]
    leaf_coverage: Float[Array, "m leaves"] | None
    training: TrainingRecord
    leaf_widening: Widening | None
    widening: Widening | None

    def __call__(self, x: Table) -> Normal | Mixture:
        """The predictions at the rows of x: normal distributions, or of an ensemble mixtures of them.

        Args:
            x: inputs [n, d], or a data frame, as `Columns.table` takes them; a vector [n] is one column.

        Raises:
            ValueError: if x is empty, not finite, or has other columns than the training inputs, or a categorical
                column has an unseen category, where that is an error.
        """
        return _predict(self, self.columns.table(x))

    def apply(self, x: Table, *, member: int = 0) -> Int[Array, " n"]:
        """The number of the leaf of a member's tree that each row of x falls into: groups for `by=fitted.apply`.

        Args:
            x: as of the call.
            member: which one.

        Raises:
            ValueError: as the call does; if there is no such member.
        """
        return _leaves(self, self._tree_of(member), self.columns.table(x))

    @property
    def heterogeneity(self) -> Float[Array, " m"]:
        """How much the uncertainty differs between leaves, for every member: the standard deviation of log `leaf_rmse`.

        A leaf that is predicted to rounding counts with the rounding error of the target's standard deviation.

        Source: Ma, Yan and Zhang (2023), table IX.
        """
        rounding = jnp.finfo(self.leaf_rmse.dtype).eps * self.y_scaler.scale
        return jnp.nanstd(jnp.log(jnp.maximum(self.leaf_rmse, rounding)), axis=1)

    def root(self, names: Sequence[str] | None = None, *, member: int = 0) -> Branch:
        """A member's tree, as nested nodes to read or to draw (`plots.tree`).

        Args:
            names: the names of the columns of x; by default those of the data frame of the fit, or x[0], x[1], ...
            member: which one.

        Raises:
            ValueError: if there is another number of names than columns, or no such member.
        """
        known = self.columns.table_names()
        names = known if names is None else names
        if len(names) != len(known):
            raise ValueError(f"there are {len(known)} columns; got {len(names)} names.")
        tree, leaf_rmse = self._tree_of(member), self.leaf_rmse[member]
        return tree.branch(names, self.columns.shown_labels(), leaf_rmse)

    def text(self, names: Sequence[str] | None = None, *, member: int = 0) -> str:
        """A member's tree as text, a line for every node; the arguments are those of `root`.

        A line has the rows of a node, the std of its residuals, |T| of its best split with the logarithm of its
        corrected p-value, and where it is split the std of the residuals on the right over that on the left, with its
        interval (`USNRT.trees`); of a leaf the root mean square of its training residuals.
        """
        return self.root(names, member=member).text()

    def leaf_table(self, names: Sequence[str] | None = None, *, member: int = 0) -> dict[str, np.ndarray]:
        """The leaves of a member's tree as a table, a list [leaves] for every column: `pandas.DataFrame` takes it.

        Args:
            names: as of `root`.
            member: which one.

        Returns:
            "leaf": its number, as `apply` gives it; "condition": what leads there from the root; "num_rows": its
            training rows; "residual_std": the standard deviation of their residuals by the last test, in the unit of y,
            NaN where there was no test; "rmse": the root mean square of the residuals of the leaf's own networks;
            "coverage": the fraction of its held-out rows in the 90 % intervals, `leaf_coverage`, NaN with the preset.

        Raises:
            ValueError: as `root`.
        """
        leaves = self.root(names, member=member).leaves()
        table = {
            name: np.array([getattr(leaf, name) for leaf in leaves])
            for name in ("leaf", "num_rows", "residual_std", "rmse")
        }
        number, condition = table.pop("leaf"), np.array([leaf.path for leaf in leaves])
        of_leaves = np.full(self.leaf_rmse.shape, np.nan) if self.leaf_coverage is None else self.leaf_coverage
        return {"leaf": number, "condition": condition, **table, "coverage": np.asarray(of_leaves[member])[number]}

    def _tree_of(self, member: int) -> Tree:
        _checks.check_choice("member", member, tuple(range(self.leaf_rmse.shape[0])))
        return jax.tree.map(lambda part: part[member], self.trees)


def _grow(
    problem: Problem,
    search: Search,
    settings: presets.Settings,
    num_members: int,
    key: PRNGKeyArray | None,
    residuals: Float[np.ndarray, "m n"] | None,
) -> list[Growing]:
    """The trees, by these residuals of every member, or by those of a network for every node."""

    def residuals_of(members: list[int], rows: list[np.ndarray], key: PRNGKeyArray | None) -> list[np.ndarray]:
        if residuals is not None:
            return [residuals[member][part] for member, part in zip(members, rows, strict=True)]
        assert key is not None  # `fit` gives one where something is drawn
        slots = num_members * search.slots(len(problem.target))
        return _tree_networks.node_residuals(problem, settings, slots, rows, key)

    return grow(problem, search, residuals_of, num_members, key)


@numpy_or_jit
def _leaves(fitted: USNRT, tree: Tree, table: Float[AnyArray, "n c"]) -> Int[AnyArray, " n"]:
    """The number of the leaf of one tree that each row falls into."""
    is_categorical = namespace(table).asarray(np.isin(np.arange(table.shape[1]), fitted.columns.categorical))
    return tree.leaves_of(table, fitted.columns.codes(table), is_categorical)


@partial(numpy_or_jit, around=predicted_by_buckets)
def _predict(fitted: USNRT, table: Float[AnyArray, "n c"]) -> Normal | Mixture:
    means, variances = _moments(fitted, table)
    if means.shape[0] == 1:
        return as_normal((means[0], variances[0]), fitted.y_scaler)
    return as_mixture(means, variances, fitted.widening, fitted.y_scaler)


def _moments(fitted: USNRT, table: Float[AnyArray, "n c"]) -> tuple[Float[AnyArray, "m n"], Float[AnyArray, "m n"]]:
    """The mean and the variance of every member, of the standardized target."""
    xp = namespace(table, fitted.leaf_rmse)
    inputs = fitted.x_scaler(fitted.columns.inputs(table))
    numbers = xp.arange(fitted.leaf_rmse.shape[-1])

    def member(own: tuple[Tree, tuple[NormalNetwork, Widening | None]]) -> tuple[AnyArray, AnyArray]:
        tree, of_leaves = own
        leaf = _leaves(fitted, tree, table)

        def place(moments: tuple[AnyArray, AnyArray], part: tuple) -> tuple[tuple[AnyArray, AnyArray], None]:
            number, (network, widening) = part
            is_in = leaf == number
            # NumPy asks a leaf's network of the leaf's rows alone.
            mean, variance = at_rows(network, inputs[is_in] if xp is np else inputs)
            found = mean, widened(variance, widening)
            return tuple(_placed(*each, is_in) for each in zip(moments, found, strict=True)), None

        nothing = tuple(xp.zeros(table.shape[0], inputs.dtype) for _ in range(2))
        return scan(place, nothing, (numbers, of_leaves))[0]

    return over_leading_axis(member, (fitted.trees, (fitted.networks, fitted.leaf_widening)))


def _placed(whole: Float[AnyArray, " n"], part: Float[AnyArray, "..."], is_in: Bool[AnyArray, " n"]) -> AnyArray:
    """The values with those of a part: of all rows in a program, of the rows inside for NumPy, which writes them."""
    if isinstance(whole, jax.Array):
        return jnp.where(is_in, part, whole)
    whole[is_in] = part
    return whole


@numpy_or_jit
def _widening_of_mixture(fitted: USNRT, table: Float[AnyArray, "n c"], target: Float[AnyArray, " n"]) -> Widening:
    """That of held-out rows, of the standardized target."""
    return Widening.of_mixture(*_moments(fitted, table), target)
