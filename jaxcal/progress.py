"""How far long work is: a bar on a terminal or in a notebook, or whatever a callback makes of it.

What may take more than a few seconds says so: trainings of networks, trees, stochastic bounds, folds, sweeps. By
default a bar with the time left is shown on stderr, where that is a terminal, and in a notebook, if the work takes
longer than two seconds; it is cleared in the end. `to` names a callback in its place, or silence, for all that is
called inside:

    with jc.progress.to(print):
        jc.pipeline.fit(x, y, predictor=jc.mlp.fit, key=key)

    cross-validation: models 0 of 10
    cross-validation: models 0 of 10, mlp.fit: epochs 0 of 1000
    ...

Inside of `jit`, `vmap` and `grad` nothing is reported, and no callback is part of a compiled program: a loop that
reports is left now and then and entered again, with the same results to the last bit.
"""

import multiprocessing
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Optional

import jax

from jaxcal import _checks

# A bar is shown of work that takes longer, and drawn anew at most so often, in seconds.
_DELAY, _BETWEEN_DRAWINGS = 2.0, 0.1
# A compiled loop is left about so often, in seconds: often enough to see it move, and to interrupt it.
_BETWEEN_REPORTS = 0.25


class Progress(NamedTuple):
    """How far a piece of work is.

    Attributes:
        label: what is done, and its steps: "mlp.fit: epochs".
        done: how many steps are done.
        total: how many there are, or are at most, where a training may stop earlier; None where that is not known.
        is_finished: whether this was the last step. Of work that ends with an exception nothing more is reported.
        inner: the work that is going on inside of this step, such as the training of a fold's network; None where there
            is none. It may be one of several in a step, one after another.

    Example:
        >>> print(Progress("cross-validation: models", 2, 10, inner=Progress("mlp.fit: epochs", 140, 1000)))
        cross-validation: models 2 of 10, mlp.fit: epochs 140 of 1000
    """

    label: str
    done: int
    total: int | None
    is_finished: bool = False
    inner: Optional["Progress"] = None

    @property
    def fraction(self) -> float | None:
        """How much of the work is done, what is done inside of a step included; None without a total."""
        if not self.total:
            return None
        inside = 0.0 if self.inner is None else self.inner.fraction or 0.0
        return min((self.done + inside) / self.total, 1.0)

    def __str__(self) -> str:
        """The work, and that inside of it, in a line."""
        number = f"{self.done}" if self.total is None else f"{self.done} of {self.total}"
        return f"{self.label} {number}" + ("" if self.inner is None else f", {self.inner}")


Callback = Callable[[Progress], Any]


class _Setting(NamedTuple):
    """Who is told, and what is going on."""

    callback: Callback | None
    outer: Optional["Work"]


def _show(_: Progress) -> None:
    """In place of a callback: a bar, where one can be shown."""


_DEFAULT = _Setting(_show, None)
_setting: ContextVar[_Setting] = ContextVar("jaxcal.progress", default=_DEFAULT)


@contextmanager
def to(callback: Callback | None) -> Iterator[None]:
    """Report the progress of all that is called inside to a callback, in place of the bar; None for silence.

    The callback is called with a `Progress` of the outermost work, which holds those inside: when work begins, several
    times a second or after every step, if steps take longer, and when it ends. What it raises ends the work. The
    setting is that of this thread, as of a context variable: in other threads there is neither callback nor bar.

    Example:
        >>> import jax, numpy as np, jaxcal as jc
        >>> x, seen = np.linspace(-1, 1, 50), []
        >>> with jc.progress.to(seen.append):
        ...     network = jc.mlp.fit(x, x**2, key=jax.random.key(0), max_epochs=5)
        >>> print(seen[0], "|", seen[-1], seen[-1].is_finished)
        mlp.fit: epochs 0 of 5 | mlp.fit: epochs 5 of 5 True
        >>> with jc.progress.to(None):
        ...     network = jc.mlp.fit(x, x**2, key=jax.random.key(0), max_epochs=5)
    """
    token = _setting.set(_Setting(callback, None))
    try:
        yield
    finally:
        _setting.reset(token)


class Work:
    """A piece of work that is going on; made by `work`.

    Attributes:
        done: how many steps are done.
        is_silent: whether nobody listens.
    """

    def __init__(self, label: str, total: int | None, callback: Callback | None, outer: Optional["Work"]):
        """Nothing is done yet."""
        self.done, self.is_silent = 0, callback is None
        self._label, self._total, self._callback, self._outer = label, total, callback, outer
        self._reported, self._rate = time.perf_counter(), 0.0

    def report(self, done: int) -> None:
        """So many steps are done, no fewer than before."""
        now = time.perf_counter()
        self._rate = (done - self.done) / max(now - self._reported, 1e-6)
        self.done, self._reported = done, now
        self._tell()

    def advance(self, steps: int = 1) -> None:
        """So many more steps are done."""
        self.report(self.done + steps)

    def next_stop(self) -> int:
        """After which step to report next, for steps that are taken by one program: all of them where nobody listens.

        First after one of them, then as many as take the time between two reports. Of work with a total.
        """
        total = self._total or 0
        return total if self.is_silent else min(self.done + max(int(self._rate * _BETWEEN_REPORTS), 1), total)

    def _tell(self, is_finished: bool = False) -> None:
        if self._callback is None:
            return
        told, outer = Progress(self._label, self.done, self._total, is_finished), self._outer
        while outer is not None:
            told, outer = Progress(outer._label, outer.done, outer._total, inner=told), outer._outer
        self._callback(told)


@contextmanager
def work(label: str, total: int | None, *values: Any, done: int = 0) -> Iterator[Work]:
    """A piece of work of so many steps, or of None knows how many, which says inside how many of them are done.

    Args:
        label: what is done, and its steps: "mlp.fit: epochs".
        total: how many steps there are at most.
        values: what is worked on, pytrees: where a transformation of JAX traces one of them, nothing is reported.
        done: steps that are done already.

    Example:
        >>> with to(print), work("example: steps", 2) as steps:
        ...     for _ in range(2):
        ...         steps.advance()
        example: steps 0 of 2
        example: steps 1 of 2
        example: steps 2 of 2
        example: steps 2 of 2
    """
    setting = _setting.get()
    if setting.callback is None or _checks.is_traced(*jax.tree.leaves(values)):
        yield Work(label, total, None, None)
        return
    bar = None
    if setting.callback is _show and setting.outer is None:
        bar = _Bar() if _can_show() else None
        setting = _Setting(bar, None)
    going_on = Work(label, total, setting.callback, setting.outer)
    going_on.done = done
    token = _setting.set(_Setting(setting.callback, going_on))
    try:
        going_on._tell()
        yield going_on
        going_on._tell(is_finished=True)
    finally:
        _setting.reset(token)
        if bar is not None:
            bar.close()


def _can_show() -> bool:
    """Whether somebody looks at stderr, and nothing else writes bars at the same time, as other threads may."""
    if threading.current_thread() is not threading.main_thread() or multiprocessing.parent_process() is not None:
        return False
    ipython = sys.modules.get("IPython")
    is_notebook = ipython is not None and hasattr(ipython.get_ipython(), "kernel")
    return is_notebook or (sys.stderr is not None and sys.stderr.isatty())


class _Bar:
    """A bar of tqdm's, once the work has taken long enough."""

    def __init__(self):
        self._began, self._drawn, self._at_first, self._bar = time.time(), 0.0, None, None

    def __call__(self, told: Progress) -> None:
        """Draw it."""
        now, place = time.time(), told.fraction
        if self._at_first is None:
            self._at_first = place or 0.0
        if now < max(self._began + _DELAY, self._drawn + _BETWEEN_DRAWINGS):
            return
        if self._bar is None:
            self._bar = _new_bar(self._began, self._at_first, has_end=place is not None)
        # Where a step is several pieces of work, one after another, each of them begins at 0.
        self._bar.n = max(self._bar.n, place or 0.0)
        self._bar.set_description_str(str(told), refresh=True)
        self._drawn = now

    def close(self) -> None:
        """Clear it."""
        if self._bar is not None:
            self._bar.close()


def _new_bar(began: float, at_first: float, *, has_end: bool) -> Any:
    with warnings.catch_warnings():  # that ipywidgets are missing: then the bar is text
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # no thread

    form = "{desc} |{bar:20}| {percentage:3.0f} % [{elapsed}, {remaining} left]" if has_end else "{desc} [{elapsed}]"
    options = {"total": 1.0 if has_end else None, "initial": at_first, "bar_format": form}
    # With a delay it is not drawn before it is described.
    bar = Bar(leave=False, dynamic_ncols=True, smoothing=0, delay=1e-9, **options)
    bar.start_t = began  # of the time left, too
    return bar
