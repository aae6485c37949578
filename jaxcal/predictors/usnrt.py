"""USNRT: a tree that splits where the uncertainty differs, with networks of mean and variance in its leaves.

Ma, Yan & Zhang, "Improving Uncertainty Quantification of Variance Networks by Tree-Structured Learning" (2023). At
every node a network is trained. Levene's test looks among all splits for the split between whose sides the spread of
the residuals differs most. If that is significant, the node is split (section IV-B, algorithm 1). In every leaf a
variance network is trained in its alternating form (section IV-D). Several such trees make the ensemble.
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
from jaxcal.networks.training import settle
from jaxcal.predictors import _tree_networks
from jaxcal.predictors._growing import FOLDS, Growing, GrowingData, Search, arranged, grow, in_unit, stack_trees
from jaxcal.predictors._tree import Branch, Tree
from jaxcal.predictors._tree_networks import Draws


class Splits(eqx.Module):
    """How the splits of a node are searched and tested; an option that is None has its default.

    Attributes:
        significance: the p-value up to which a node is split.
        center: what Levene's test takes deviations from, "median" (the default) or "mean".
        correction: of the p-value for the number of splits, "miller-siegmund" (the default), "permutation" or "none".
        step: only every step-th row of a column's order is a candidate threshold (default 1).
        num_folds: number of folds for out-of-fold residuals (default 5). With 1, a network is trained at every node
            that is tested, and most of the residuals are of its own training rows.
        hidden: hidden widths of the networks whose residuals are tested (default 64, 64).

    Raises:
        ValueError: if an option is out of its range.
    """

    significance: float = eqx.field(static=True, default=0.01)
    center: str | None = eqx.field(static=True, default=None)
    correction: str | None = eqx.field(static=True, default=None)
    step: int | None = eqx.field(static=True, default=None)
    num_folds: int | None = eqx.field(static=True, default=None)
    hidden: Sequence[int] | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        """Raise ValueError if an option is out of its range."""
        _checks.check_fraction("significance", self.significance)
        _checks.check_choice("center", self.center, (None, "mean", "median"))
        _checks.check_choice("correction", self.correction, (None, "none", "miller-siegmund", "permutation"))
        for name in ("step", "num_folds"):
            if getattr(self, name) is not None:
                _checks.check_at_least(name, getattr(self, name), 1)


def fit(
    x: "Table",
    y: "Series",
    *,
    key: "PRNGKeyArray",
    categorical: "Categorical" = (),
    unseen: str = "error",
    num_members: int = 1,
    min_leaf: int | str = "auto",
    splits: "Splits | None" = None,
    preset: str | None = None,
    **options: "Unpack[TrainingOptions]",
) -> "USNRT":
    """Grow a tree by Levene's test on residuals, and train networks of mean and variance in its leaves.

    ReLU networks are trained on the squared error, one without each of five folds of the rows. A node with at least 2
    `min_leaf` rows may be split in two, by a threshold of a continuous column or by categories of a categorical column.
    All splits that leave `min_leaf` rows on either side are searched. The search finds the largest |T| of Levene's test
    between the out-of-fold residuals of the sides (eq. 5 and 6; `functional.levene`), exactly up to 16 categories.
    Where its p-value is at most `significance` of `Splits`, the node is split.

    In a leaf, ReLU networks for the mean and the variance are trained alternately, twice, as in `variance_network`'s
    alternating form (eq. 7). They start from networks of all rows, so a leaf need not learn from few rows what all rows
    have in common. The variance network of all rows is trained on the out-of-fold residuals. A leaf's network stays as
    it starts unless training lowers its loss of the leaf's validation rows by the standard error. The distribution of a
    row is N(m(x), v(x)) by the networks of its leaf. With several members, it is the mixture of their distributions.

    All networks are trained as `jaxcal.networks.TrainingOptions` says. A random fraction of all rows is held out: no
    leaf of any member is trained on them. The held-out rows in a leaf are its validation set. They widen the variance
    of the leaf, as in `variance_network.fit`; the held-out rows of all other leaves count as 50 more. For several
    members, the held-out rows also widen the mixture once more. A categorical column enters as indicators of its
    categories.

    The least of very many p-values is small even where nothing differs. The paper's rule does not correct for this. It
    splits pure noise in 7 of 10 cases, and nearly always if the noise is skewed and centered by the mean. In `Splits`,
    `correction="miller-siegmund"` is a bound for the largest |T|, "permutation" an exact test that permutes the
    residuals, and "none" the paper's rule. For skewed residuals, only the median-centered test holds its level.

    A network's residuals on its own training rows are too small, most of all where the network bends most. A split may
    follow these places instead of the noise. Out-of-fold residuals do not have this fault. But they contain the parts
    of the signal that the networks of the other folds cannot fit, which also differ from place to place. So with few
    rows and little noise, more than the fraction `significance` of fits are split where the noise is the same
    everywhere.

    A column of a data frame that is categorical or holds strings is taken as categorical. The fit keeps the names and
    the labels. Predictions take a frame, whose columns are looked up by their names, or an array of numbers.

    `preset="paper"` takes center="mean" (eq. 5), correction="none", step=10 and num_folds=1, as in the paper's
    experiments; the authors' code centers at the median. Every node trains its own network (section IV-B), and the
    networks of the leaves start anew. With d columns, the hidden layers have 8d and 4d units at nodes, and 4d and 2d
    units in leaves. The network of the variance has tanh in place of ReLU. The learning rate is 0.01, the batch size 64
    and the patience 25. Every training draws its own validation rows, and nothing is widened.

    A tree grows by the values of its rows: the fit does not run under `jit` or `vmap`. Predictions do, and are
    differentiable in x within a leaf.

    Args:
        x: inputs [n, d], or a data frame; a vector [n] is one column.
        y: targets [n]. A constant target is predicted exactly, with std 0.
        key: random key of the weights, the validation rows, the batches and the permutations.
        categorical: the columns of x whose values have no order, by position, or of a data frame by name.
        unseen: the treatment of a category that was not in the fit: an "error", or the "majority" category in its
            place.
        num_members: number of trees, each with its own networks.
        min_leaf: the least number of rows of a leaf. "auto" is a tenth of the rows, but at least 200, or 1000 with the
            preset. If this is more than half of the rows, a warning says that the tree is one leaf.
        splits: how splits are searched and tested, a `Splits`; None for its defaults.
        preset: None, or "paper" for other defaults, as above.
        **options: of the training, as in `jaxcal.networks.TrainingOptions`. hidden has the widths of both networks in a
            leaf.

    Raises:
        TypeError: if x or y is traced by a transformation of JAX; if key is no random key.
        ValueError: if x or y is empty, not finite or of the wrong shape, or if there are too few rows to hold some of
            them out. Also if an option is out of its range.
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
    paper_preset = presets.usnrt(columns.num_columns)
    leaf = paper_preset._replace(hidden=(4 * columns.num_columns, 2 * columns.num_columns), patience=25)
    settings = settle(fit, options, {None: presets.DEFAULT, "paper": leaf}, preset)
    _checks.check_at_least("num_members", num_members, 1)
    split_options = _checks.options_of("splits", splits, Splits, "jc.usnrt.Splits")
    search = Search.of(preset, len(y), columns.num_columns, min_leaf, **split_options)
    scalers, problem = arranged(columns, table, y, log_tails=settings.log_tails)
    # The most leaves that there can be.
    num_leaves = num_members * max(len(y) // search.min_leaf, 1)
    grow_key, *keys = _random.split(key, 5)
    leaf_draws, fold_draws, held_out_draws, final_draws = map(Draws.of, keys)
    splitting = settings._replace(hidden=tuple(search.hidden))
    folds = partial(_tree_networks.out_of_fold_residuals, problem, splitting, num_members=num_members, draws=fold_draws)
    residuals = None if search.num_folds == 1 else folds(search.num_folds)
    draws = residuals is None or search.correction == "permutation"
    trees = _grow(problem, search, splitting, num_members, grow_key if draws else None, residuals)
    held_out = _tree_networks.held_out_rows(problem, settings, held_out_draws)
    start = None
    if held_out is not None:
        residuals = folds(FOLDS) if residuals is None else residuals
        start = _tree_networks.train_on_all_rows(problem, settings, held_out, residuals, final_draws)
    rows = [tree.leaves() for tree in trees]
    leaves = _tree_networks.train_leaves(problem, settings, rows, num_leaves, held_out, start, leaf_draws)
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
        x_scaler: the standardization of the networks' inputs.
        y_scaler: the standardization of the target.
        trees: the trees of the members, padded to a common size [m, nodes].
        networks: the networks of the leaves [m, leaves]. A tree with fewer leaves is filled up with copies of its
            first.
        leaf_rmse: the root mean square of the training residuals in every leaf [m, leaves], in the unit of y; NaN where
            there is no such leaf.
        leaf_coverage: the fraction of held-out rows in the 90 % intervals of every leaf [m, leaves], after the
            widening, which the same rows decided. NaN where there is no such leaf; None with the preset.
        training: how the training of every leaf's networks went [m, leaves], a `jaxcal.networks.TrainingRecord`.
        leaf_widening: the correction of the variance in every leaf [m, leaves] to new rows; None with the preset.
        widening: the correction of the mixture of several members to new rows, after `leaf_widening`; None for one
            member, and with the preset.
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
        """The predictions at the rows of x: normal distributions, or mixtures of them for an ensemble.

        Args:
            x: inputs [n, d], or a data frame, as `Columns.table` takes them; a vector [n] is one column.

        Raises:
            ValueError: if x is empty, not finite, or has other columns than the training inputs. Also if a categorical
                column has an unseen category, unless unseen="majority".
        """
        return _predict(self, self.columns.table(x))

    def apply(self, x: Table, *, member: int = 0) -> Int[Array, " n"]:
        """The number of the leaf of a member's tree that each row of x falls into: groups for `by=fitted.apply`.

        Args:
            x: as in the call.
            member: the member's number.

        Raises:
            ValueError: as the call does; if there is no such member.
        """
        return _leaves(self, self._tree_of(member), self.columns.table(x))

    @property
    def heterogeneity(self) -> Float[Array, " m"]:
        """How much the uncertainty differs between leaves, for every member: the standard deviation of log `leaf_rmse`.

        A leaf whose value is below the rounding error of the target's standard deviation counts with this rounding
        error.

        Source: Ma, Yan and Zhang (2023), table IX.
        """
        rounding = jnp.finfo(self.leaf_rmse.dtype).eps * self.y_scaler.scale
        # std over leaves of log(max(rmse, eps * std of the target))
        return jnp.nanstd(jnp.log(jnp.maximum(self.leaf_rmse, rounding)), axis=1)

    def root(self, names: Sequence[str] | None = None, *, member: int = 0) -> Branch:
        """A member's tree, as nested nodes to read or to draw (`plots.tree`).

        Args:
            names: the names of the columns of x; by default the names of the data frame of the fit, or x[0], x[1], ...
            member: the member's number.

        Raises:
            ValueError: if the number of names is not the number of columns, or there is no such member.
        """
        known = self.columns.table_names()
        names = known if names is None else names
        if len(names) != len(known):
            raise ValueError(f"there are {len(known)} columns; got {len(names)} names.")
        tree, leaf_rmse = self._tree_of(member), self.leaf_rmse[member]
        return tree.branch(names, self.columns.shown_labels(), leaf_rmse)

    def text(self, names: Sequence[str] | None = None, *, member: int = 0) -> str:
        """A member's tree as text, a line for every node; the arguments are the arguments of `root`.

        A line gives the number of rows of a node, the std of its residuals, and |T| of its best split. The logarithm of
        the corrected p-value follows. If the node is split, the line also gives a ratio with its interval
        (`USNRT.trees`): the std of the residuals on the right over the std on the left. For a leaf, it gives the root
        mean square of its training residuals.
        """
        return self.root(names, member=member).text()

    def leaf_table(self, names: Sequence[str] | None = None, *, member: int = 0) -> dict[str, np.ndarray]:
        """The leaves of a member's tree as a table, a list [leaves] for every column: `pandas.DataFrame` takes it.

        Args:
            names: as in `root`.
            member: the member's number.

        Returns:
            "leaf": the number of the leaf, as `apply` gives it.
            "condition": all conditions that lead there from the root.
            "num_rows": the number of its training rows.
            "residual_std": the standard deviation of their residuals by the last test, in the unit of y; NaN where
                there was no test.
            "rmse": the root mean square of the residuals of the leaf's own networks.
            "coverage": the fraction of its held-out rows in the 90 % intervals, `leaf_coverage`; NaN with the preset.

        Raises:
            ValueError: as in `root`.
        """
        leaves = self.root(names, member=member).leaves()
        table = {
            name: np.array([getattr(leaf, name) for leaf in leaves])
            for name in ("leaf", "num_rows", "residual_std", "rmse")
        }
        number, condition = table.pop("leaf"), np.array([leaf.path for leaf in leaves])
        coverages = np.full(self.leaf_rmse.shape, np.nan) if self.leaf_coverage is None else self.leaf_coverage
        return {"leaf": number, "condition": condition, **table, "coverage": np.asarray(coverages[member])[number]}

    def _tree_of(self, member: int) -> Tree:
        _checks.check_choice("member", member, tuple(range(self.leaf_rmse.shape[0])))
        return jax.tree.map(lambda part: part[member], self.trees)


def _grow(
    problem: GrowingData,
    search: Search,
    settings: presets.Settings,
    num_members: int,
    key: PRNGKeyArray | None,
    residuals: Float[np.ndarray, "m n"] | None,
) -> list[Growing]:
    """The trees, by the given residuals of every member, or by residuals of a network for every node."""

    def residuals_of(members: list[int], rows: list[np.ndarray], key: PRNGKeyArray | None) -> list[np.ndarray]:
        if residuals is not None:
            return [residuals[member][part] for member, part in zip(members, rows, strict=True)]
        assert key is not None  # `fit` gives a key where something is drawn
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
    """The mean and the variance by every member, for the standardized target."""
    xp = namespace(table, fitted.leaf_rmse)
    inputs = fitted.x_scaler(fitted.columns.inputs(table))
    numbers = xp.arange(fitted.leaf_rmse.shape[-1])

    def member(own: tuple[Tree, tuple[NormalNetwork, Widening | None]]) -> tuple[AnyArray, AnyArray]:
        tree, leaf_models = own
        leaf = _leaves(fitted, tree, table)

        def place(moments: tuple[AnyArray, AnyArray], part: tuple) -> tuple[tuple[AnyArray, AnyArray], None]:
            number, (network, widening) = part
            is_in = leaf == number
            # In NumPy a leaf's network predicts the leaf's rows alone; in JAX, all rows.
            mean, variance = at_rows(network, inputs[is_in] if xp is np else inputs)
            predicted = mean, widened(variance, widening)
            return tuple(_placed(*each, is_in) for each in zip(moments, predicted, strict=True)), None

        nothing = tuple(xp.zeros(table.shape[0], inputs.dtype) for _ in range(2))
        return scan(place, nothing, (numbers, leaf_models))[0]

    return over_leading_axis(member, (fitted.trees, (fitted.networks, fitted.leaf_widening)))


def _placed(whole: Float[AnyArray, " n"], part: Float[AnyArray, "..."], is_in: Bool[AnyArray, " n"]) -> AnyArray:
    """The values, with the values of a part in their places.

    In a program the part has all rows. In NumPy it has the rows inside alone, and they are written into `whole`.
    """
    if isinstance(whole, jax.Array):
        return jnp.where(is_in, part, whole)
    whole[is_in] = part
    return whole


@numpy_or_jit
def _widening_of_mixture(fitted: USNRT, table: Float[AnyArray, "n c"], target: Float[AnyArray, " n"]) -> Widening:
    """The widening of the mixture by held-out rows, for the standardized target."""
    return Widening.of_mixture(*_moments(fitted, table), target)
