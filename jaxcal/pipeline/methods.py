"""The errors to which the last step of a pipeline is fitted: `Folds`, `Split`, `CVPlus`, `Prefit`.

A method divides the rows into folds. The model of each fold predicts held-out rows. The method divides these
predictions into parts, so that the last step is scored on rows that it was not fitted to.
"""

import abc
import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import ArrayLike, PRNGKeyArray

from jaxcal import _checks, _random
from jaxcal.pipeline.folds import Fold, as_folds, as_labels, drawn, number_for

# From `MANY_ROWS` rows on, `SET_ASIDE` rows are enough to calibrate a pipeline. The same number is enough to combine
# predictors. Each predictor is then fitted twice in place of six times.
MANY_ROWS, SET_ASIDE = 10_000, 2_000
# The number of folds if a time limit leaves time for them.
FOLDS_WITH_TIME = 10

# Two random keys: for a single draw, and for folds.
Keys = tuple[PRNGKeyArray, PRNGKeyArray]


class Division(NamedTuple):
    """How the rows of a pipeline are divided.

    Attributes:
        folds: a model is fitted to the training rows of each, and predicts those that it holds out.
        parts: the held-out rows in parts, as places among all held-out rows. Each fold is a part; a single fold has
            several parts.
        predicts: which models predict new rows. The value "all_rows" means a model that is fitted to all rows, and
            "fold" means the only model. The value "folds" means all models together.
    """

    folds: list[Fold]
    parts: list[np.ndarray]
    predicts: str

    @property
    def rows(self) -> np.ndarray:
        """The numbers of the rows that are held out, fold by fold."""
        return np.concatenate([fold.held_out for fold in self.folds])


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Method(abc.ABC):
    """How the rows are divided; its kinds are `Folds`, `Split`, `CVPlus` and `Prefit`.

    Attributes:
        folds: the number of folds. None means 10 folds for at most 500 rows, and 5 folds for more. With few rows,
            models of five folds have errors that are too large. `Folds` and `Prefit` also take the row numbers of each
            fold, which hold every row once. Or they take pairs of training rows and held-out rows, as the splitters of
            scikit-learn give them. Pairs hold out every row at most once. No step is calibrated by a row that is never
            held out.
        groups: labels [n]: rows of one group stay in one fold, or on one side of the split.
    """

    folds: int | Iterable | None = None
    groups: ArrayLike | None = None

    name: ClassVar[str]
    takes_rows: ClassVar[bool] = True

    @abc.abstractmethod
    def divide(self, num_rows: int, keys: Keys) -> Division:
        """The rows of each fold.

        Args:
            num_rows: the number of rows.
            keys: the random keys of a single draw, and of folds.

        Raises:
            ValueError: if there are fewer rows or groups than folds. Also if given folds hold out a row several times,
                train on a row that they hold out, or come with groups.
        """

    def has_usual_folds(self, num_rows: int) -> bool:
        """Whether there may be more random folds: no number was given, and there are not too many rows."""
        is_usual = self.folds is None and self.groups is None and number_for(None, num_rows) < FOLDS_WITH_TIME
        return is_usual and num_rows < MANY_ROWS // 2

    @property
    def number(self) -> int | None:
        """The number of folds, if it was given."""
        folds: Any = self.folds
        return None if isinstance(folds, Iterable) else folds

    def labels(self, num_rows: int) -> np.ndarray | None:
        """The labels of the groups, if there are any."""
        return as_labels(self.groups, num_rows)

    def checked(self, num_rows: int) -> "Method":
        """The same method with checked folds, if folds of rows were given.

        Raises:
            ValueError: as of `divide`.
        """
        self.labels(num_rows)
        if hasattr(self.folds, "split") and not isinstance(self.folds, str):
            raise ValueError(
                f"folds is a {type(self.folds).__name__}: give the folds that it makes, list(folds.split(x, y))."
            )
        if not isinstance(self.folds, Iterable):
            return self
        folds = list(self.folds)
        if not self.takes_rows:
            raise ValueError(
                f"method={self.name!r} draws its folds itself: give their number; got {len(folds)} lists of rows."
            )
        _checks.check_alone("folds says which rows stay together", groups=self.groups)
        return dataclasses.replace(self, folds=as_folds("folds", folds, num_rows))


class Folds(Method):
    """Predictor and calibrators are fitted once without each fold, and then to all rows.

    No guarantee follows, since the model that predicts made none of the errors. The measured coverage is reported.
    """

    name = "folds"

    def divide(self, num_rows: int, keys: Keys) -> Division:
        """Random folds, or the folds that were given."""
        return _divided(self, num_rows, keys[1], "all_rows")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Split(Method):
    """A fraction of the rows is set aside for the last step, so that its guarantee holds, if it gives one.

    Attributes:
        fraction: the fraction of the rows that is set aside. With fewer than 9 rows set aside, no 90 % interval can be
            guaranteed, and the interval is infinite.
        folds: the number of parts by which the last step is scored; None means the same numbers as for `Folds`.
        groups: labels [n]: rows of one group stay on one side.
    """

    fraction: float = 0.25

    name = "split"
    takes_rows = False

    def divide(self, num_rows: int, keys: Keys) -> Division:
        """A random fraction of the rows or of the groups, and the rest."""
        _checks.check_fraction("fraction", self.fraction)
        groups = self.labels(num_rows)
        kinds, label_of = np.unique(np.arange(num_rows) if groups is None else groups, return_inverse=True)
        aside_key, parts_key = _random.split(keys[0])
        number = round(self.fraction * len(kinds))
        folds = max(2, min(number, number_for(None, num_rows))) if self.number is None else self.number
        if not folds <= number < len(kinds):
            raise ValueError(
                f"a fraction of {self.fraction:g} sets {number} of {len(kinds)} "
                f"{'rows' if groups is None else 'groups'} aside; at least {folds} are needed, and one to fit on."
            )
        chosen = np.asarray(_random.permutation(aside_key, len(kinds)))[:number]
        aside = np.flatnonzero(np.isin(label_of, chosen))
        parts = drawn(len(aside), folds, None if groups is None else groups[aside], parts_key)
        fold = Fold(np.setdiff1d(np.arange(num_rows), aside), aside)
        return Division([fold], [part.held_out for part in parts], "fold")


class CVPlus(Method):
    """Predictor and calibrators are fitted without each fold, and kept: the intervals are intervals of CV+.

    All folds have the same size. The remaining rows, fewer than folds, are training rows of every model. The guarantee
    is the guarantee of `jaxcal.cross_conformal`. With groups there is no guarantee.
    """

    name = "cv+"
    takes_rows = False

    def divide(self, num_rows: int, keys: Keys) -> Division:
        """Random folds of one size."""
        groups = self.labels(num_rows)
        folds = drawn(num_rows, number_for(self.number, num_rows, groups), groups, keys[0], equal=True)
        return Division(folds, _places(folds), "folds")


class Prefit(Method):
    """The predictor is already fitted to other rows, and all rows are for the steps after it.

    Without calibrators the guarantee of the last step holds. Calibrators are fitted without each fold, as with `Folds`.
    """

    name = "prefit"

    def divide(self, num_rows: int, keys: Keys) -> Division:
        """All rows that are held out, for the last step."""
        rows, parts, _ = _divided(self, num_rows, keys[0], "fold")
        held_out = np.concatenate([fold.held_out for fold in rows])
        return Division([Fold(np.setdiff1d(np.arange(num_rows), held_out), held_out)], parts, "fold")


def as_method(method: "str | Method", num_rows: int) -> Method:
    """The method; a name means its method with the defaults, and "auto" means folds, or a split of many rows.

    Raises:
        ValueError: if no method has this name.
    """
    if isinstance(method, Method):
        return method
    kinds = {kind.name: kind for kind in (Folds, Split, CVPlus, Prefit)}
    _checks.check_choice("method", method, ("auto", *kinds))
    if method == "auto":
        return Folds() if num_rows < MANY_ROWS else Split(fraction=SET_ASIDE / num_rows)
    return kinds[method]()


def hold_out(num_rows: int, key: PRNGKeyArray) -> Division:
    """One fold of at least `SET_ASIDE` rows, in parts; a model that is fitted to all rows predicts new rows."""
    order_key, parts_key = _random.split(key)
    fold = drawn(num_rows, num_rows // SET_ASIDE, None, order_key)[0]
    fold = fold._replace(training=np.sort(fold.training))
    return _divided(Folds(folds=[fold]), num_rows, parts_key, "all_rows")


def _divided(method: Method, num_rows: int, key: PRNGKeyArray, predicts: str) -> Division:
    """The division by random or given folds; the held-out rows of a single fold are divided at random."""
    groups = method.labels(num_rows)
    if isinstance(method.folds, list):
        folds = method.folds
    else:
        folds = drawn(num_rows, number_for(method.number, num_rows, groups), groups, key)
    if folds[1:]:
        return Division(folds, _places(folds), predicts)
    size = len(folds[0].held_out)
    return Division(folds, [part.held_out for part in drawn(size, number_for(None, size), None, key)], predicts)


def _places(folds: list[Fold]) -> list[np.ndarray]:
    """The places of the rows of each fold, among all held-out rows."""
    sizes = [len(fold.held_out) for fold in folds]
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
