"""Pictures of predictive distributions for papers, and of USNRT's tree.

Every function draws on `ax`, or on a new figure of a size for print, and returns the Axes. No function shows or saves a
figure; `ax.figure.savefig("reliability.pdf")` saves it. They need matplotlib, the extra `plots`.

- Are the probabilities right? `reliability_diagram`, `pit_histogram`, `coverage_by` groups of rows.
- Are mean and std right? `residuals`, `z_scores`.
- How do the intervals look, and how wide are they? `intervals`, `prediction_band`, `widths`, `width_against_coverage`.
- `tree` shows the splits of `predictors.usnrt`.

A picture of several forecasts takes them by name: `{"before": base, "after": calibrated}`.
"""

from jaxcal.plots._calibration import coverage_by as coverage_by
from jaxcal.plots._calibration import pit_histogram as pit_histogram
from jaxcal.plots._calibration import reliability_diagram as reliability_diagram
from jaxcal.plots._intervals import intervals as intervals
from jaxcal.plots._intervals import prediction_band as prediction_band
from jaxcal.plots._residuals import residuals as residuals
from jaxcal.plots._residuals import z_scores as z_scores
from jaxcal.plots._tree import tree as tree
from jaxcal.plots._widths import width_against_coverage as width_against_coverage
from jaxcal.plots._widths import widths as widths
