"""Rows that come one after another: intervals that follow a change, and tests for a change.

An online calibrator is a state, which is replaced and never changed. It is made from calibration rows, gives the
interval of the next row, and takes its target when it is known:

    state = jc.online.adaptive.init(base, y)           # ACI; init_aggregated for DtACI; pid.init for PID control
    lower, upper = state.interval(new_base)            # of rows whose targets are not known yet
    state, (lower, upper) = jc.online.step(state, row_base, row_y)    # one row, for lax.scan
    state, (lower, upper) = jc.online.run(state, new_base, new_y)     # many rows

`check_errors` and `check_inputs` test whether new rows are exchangeable with the calibration rows. The coverage
guarantees of `conformal` need this.
"""

from jaxcal.online import adaptive as adaptive
from jaxcal.online import martingales as martingales
from jaxcal.online import pid as pid
from jaxcal.online._base import OnlineIntervals as OnlineIntervals
from jaxcal.online._base import run as run
from jaxcal.online._base import step as step
from jaxcal.online.exchangeability import ErrorCheck as ErrorCheck
from jaxcal.online.exchangeability import InputCheck as InputCheck
from jaxcal.online.exchangeability import check_errors as check_errors
from jaxcal.online.exchangeability import check_inputs as check_inputs
