"""The progress of long work: a bar on a terminal or in a notebook, or a callback.

Work that may take more than a few seconds reports its progress: training of networks, trees, stochastic bounds, folds,
sweeps. By default a bar with the remaining time is shown if the work takes longer than two seconds. It is shown in a
notebook, and on stderr if stderr is a terminal. The bar is cleared at the end. The context `to` replaces the bar by a
callback, or by nothing, for all calls inside:

    with jc.progress.to(print):
        jc.pipeline.fit(x, y, predictor=jc.mlp.fit, key=key)

    cross-validation: models 0 of 10
    cross-validation: models 0 of 10, mlp.fit: epochs 0 of 1000
    ...

Inside `jit`, `vmap` and `grad` nothing is reported. No callback is part of a compiled program: the program of a loop
ends after some steps, reports, and starts again. The results are the same to the last bit.
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

# A bar is shown if work takes longer than 2 s, and it is drawn again after at least 0.1 s.
_DELAY, _BETWEEN_DRAWINGS = 2.0, 0.1
# Seconds between two reports of a compiled loop: short enough to see progress, and to interrupt the loop.
_BETWEEN_REPORTS = 0.25


class Progress(NamedTuple):
    """The progress of a piece of work.

    Attributes:
        label: the name of the work and of its steps: "mlp.fit: epochs".
        done: the number of finished steps.
        total: the number of all steps, or the largest number if training may stop earlier; None if it is unknown.
        is_finished: whether this was the last step. After an exception no further progress is reported.
        inner: the work that runs inside this step, such as the training of a fold's network; None if there is no such
            work. One step may contain several pieces of work, one after another.

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
        """The fraction of the work that is done, with the work inside a step; None without a total."""
        if not self.total:
            return None
        inside = 0.0 if self.inner is None else self.inner.fraction or 0.0
        return min((self.done + inside) / self.total, 1.0)

    def __str__(self) -> str:
        """The work, and the work inside it, in one line."""
        number = f"{self.done}" if self.total is None else f"{self.done} of {self.total}"
        return f"{self.label} {number}" + ("" if self.inner is None else f", {self.inner}")


Callback = Callable[[Progress], Any]


class _Listeners(NamedTuple):
    """The callback, and the work that is running."""

    callback: Callback | None
    outer: Optional["Work"]


def _show(_: Progress) -> None:
    """The default callback: it stands for a bar, if a bar can be shown."""


_DEFAULT = _Listeners(_show, None)
_setting: ContextVar[_Listeners] = ContextVar("jaxcal.progress", default=_DEFAULT)


@contextmanager
def to(callback: Callback | None) -> Iterator[None]:
    """Report the progress of all calls inside to a callback, in place of the bar. With None nothing is reported.

    The callback gets a `Progress` of the outermost work, which holds the work inside. It is called when work begins and
    when it ends. Between them it is called several times a second, or after every step if steps take longer. An
    exception in the callback ends the work. The setting is a context variable, and holds in this thread. In other
    threads there is neither callback nor bar.

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
    token = _setting.set(_Listeners(callback, None))
    try:
        yield
    finally:
        _setting.reset(token)


class Work:
    """A piece of work that is running; made by `work`.

    Attributes:
        done: the number of finished steps.
        is_silent: whether progress is not reported.
    """

    def __init__(self, label: str, total: int | None, callback: Callback | None, outer: Optional["Work"]):
        """Start with no finished step."""
        self.done, self.is_silent = 0, callback is None
        self._label, self._total, self._callback, self._outer = label, total, callback, outer
        self._reported, self._rate = time.perf_counter(), 0.0

    def report(self, done: int) -> None:
        """Report that `done` steps are finished, at least as many as before."""
        now = time.perf_counter()
        self._rate = (done - self.done) / max(now - self._reported, 1e-6)
        self.done, self._reported = done, now
        self._tell()

    def advance(self, steps: int = 1) -> None:
        """Report that further steps are finished."""
        self.report(self.done + steps)

    def next_stop(self) -> int:
        """The step after which to report next, for work with a total whose steps run in one compiled program.

        The first report comes after one step. Then the number of steps fills the time between two reports. Without
        reports it is the last step.
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
    """A context for a piece of work, which reports its finished steps by the methods of `Work`.

    Args:
        label: the name of the work and of its steps: "mlp.fit: epochs".
        total: the largest number of steps; None if it is unknown.
        values: the pytrees that the work uses. If a transformation of JAX traces one of them, nothing is reported.
        done: the number of steps that are finished already.

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
        bar = _TqdmBar() if _can_show() else None
        setting = _Listeners(bar, None)
    going_on = Work(label, total, setting.callback, setting.outer)
    going_on.done = done
    token = _setting.set(_Listeners(setting.callback, going_on))
    try:
        going_on._tell()
        yield going_on
        going_on._tell(is_finished=True)
    finally:
        _setting.reset(token)
        if bar is not None:
            bar.close()


def _can_show() -> bool:
    """Whether a bar can be shown.

    There must be a notebook, or a terminal at stderr. The thread must be the main thread of the main process, because
    other threads and processes could draw bars at the same time.
    """
    if threading.current_thread() is not threading.main_thread() or multiprocessing.parent_process() is not None:
        return False
    ipython = sys.modules.get("IPython")
    is_notebook = ipython is not None and hasattr(ipython.get_ipython(), "kernel")
    return is_notebook or (sys.stderr is not None and sys.stderr.isatty())


class _TqdmBar:
    """A bar of tqdm, which appears when the work has taken long enough."""

    def __init__(self):
        self._began, self._drawn, self._at_first, self._bar = time.time(), 0.0, None, None

    def __call__(self, told: Progress) -> None:
        """Draw the bar."""
        now, place = time.time(), told.fraction
        if self._at_first is None:
            self._at_first = place or 0.0
        if now < max(self._began + _DELAY, self._drawn + _BETWEEN_DRAWINGS):
            return
        if self._bar is None:
            self._bar = _new_bar(self._began, self._at_first, has_end=place is not None)
        # If a step has several pieces of work, one after another, each of them begins at 0.
        self._bar.n = max(self._bar.n, place or 0.0)
        self._bar.set_description_str(str(told), refresh=True)
        self._drawn = now

    def close(self) -> None:
        """Clear the bar."""
        if self._bar is not None:
            self._bar.close()


def _new_bar(began: float, at_first: float, *, has_end: bool) -> Any:
    with warnings.catch_warnings():  # tqdm warns if ipywidgets are missing, and the bar is then text
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # no thread

    form = "{desc} |{bar:20}| {percentage:3.0f} % [{elapsed}, {remaining} left]" if has_end else "{desc} [{elapsed}]"
    options = {"total": 1.0 if has_end else None, "initial": at_first, "bar_format": form}
    # With a delay the bar is not drawn before it has a description.
    bar = Bar(leave=False, dynamic_ncols=True, smoothing=0, delay=1e-9, **options)
    bar.start_t = began  # it also decides the remaining time
    return bar
