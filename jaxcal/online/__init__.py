"""Rows that come one after another: intervals that follow a change, and tests of whether there is one.

Online calibrators are states, which are never changed but replaced. They are made from calibration rows, give the
interval of the next row, and take its target when it is known:

    state = jc.online.adaptive.init(base, y)           # ACI; init_aggregated for DtACI; pid.init for PID control
    lower, upper = state.interval(new_base)            # of rows whose targets are not known yet
    state, (lower, upper) = jc.online.step(state, row_base, row_y)    # one row, for lax.scan
    state, (lower, upper) = jc.online.run(state, new_base, new_y)     # many rows

`check_errors` and `check_inputs` test whether new rows are exchangeable with the calibration rows, which is what the
coverage guarantees of `conformal` rest on.
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
