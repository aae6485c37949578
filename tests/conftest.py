"""What several files of tests draw: forecasts, on figures that are closed afterwards."""

import pytest


@pytest.fixture
def plt():
    """Draw without a screen, and close what was drawn."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")


@pytest.fixture
def forecast(rng):
    """Targets of 60 rows, and their distributions."""
    from jaxcal.distributions import Normal  # not before the shapes of jaxcal are checked

    mean, std = rng.normal(size=60), rng.uniform(0.5, 2, size=60)
    return mean + std * rng.normal(size=60), Normal(mean, std)
