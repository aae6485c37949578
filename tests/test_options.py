"""Options that would switch something off without a word are refused, by every method that has them."""

import json
import subprocess
import sys
from functools import partial

import jax
import numpy as np
import pytest

import jaxcal as jc

X = np.random.default_rng(0).normal(size=(40, 2))
Y = X[:, 0] + np.random.default_rng(1).normal(size=40)
BASE = jc.Normal(X[:, 0], 1.0)
KEY = jax.random.key(0)
SMALL = "learning_rate must be positive; got 1e-300, which is 0 in float32"

NETWORKS = {
    name: partial(getattr(jc, name).fit, X, Y, key=KEY)
    for name in ("mlp", "variance_network", "deep_ensemble", "dropout", "evidential")
}
INFERENCES = ("Exact", "Sparse", "Nearest", "Stochastic")
METHODS = {
    **NETWORKS,
    **{name: getattr(jc.gp, name) for name in (*INFERENCES, "GaussianNoise")},
    "neural_process": partial(jc.neural_process.fit, X, Y, key=KEY),
    "accrue": partial(jc.accrue.fit, X, BASE, Y, key=KEY),
    "neural_quantiles": partial(jc.neural_quantiles.fit, X, BASE, Y, key=KEY),
    "Splits": jc.usnrt.Splits,
    "conformal": partial(jc.conformal.fit, X, BASE, Y),
    "crude": partial(jc.crude.fit, X, BASE, Y),
}
NAN, WHOLE = float("nan"), "must be a whole number"
CASES = [
    *(
        (name, {option: NAN}, f"{option} {WHOLE}; got nan")
        for name in NETWORKS
        for option in ("patience", "max_epochs")
    ),
    *((name, {"max_epochs": 2.5}, f"max_epochs {WHOLE}; got 2.5") for name in NETWORKS),
    *((name, {"max_iterations": NAN}, f"max_iterations {WHOLE}") for name in (*INFERENCES, "accrue", "neural_process")),
    *((name, {"tolerance": NAN}, "tolerance must not be negative; got nan") for name in INFERENCES),
    *((name, {"tolerance": 1j}, "tolerance must hold real numbers; got dtype complex") for name in INFERENCES),
    *((name, {"ard": "no"}, "ard must be one of None, True, False, 'auto'; got 'no'") for name in INFERENCES),
    *(
        (name, {"learning_rate": 1j}, "learning_rate must hold real numbers; got dtype complex")
        for name in (*NETWORKS, "neural_process", "Exact")
    ),
    *((name, {"learning_rate": 1e-300}, SMALL) for name in (*NETWORKS, "neural_process", "Exact")),
    ("Sparse", {"points": ""}, "points must be"),
    ("Sparse", {"points": [0, 5]}, "points must be"),
    ("Sparse", {"points": np.array([0.0, 5.0])}, "points must be"),
    *((name, {"num_inducing": 2.5}, f"num_inducing {WHOLE}; got 2.5") for name in ("Sparse", "Stochastic")),
    ("Stochastic", {"epochs": 2.5}, f"epochs {WHOLE}; got 2.5"),
    ("Stochastic", {"batch_size": 2.5}, f"batch_size {WHOLE}; got 2.5"),
    ("Nearest", {"neighbors": 2.5}, f"neighbors {WHOLE}; got 2.5"),
    ("GaussianNoise", {"variance": 1j}, "the variance of the noise must hold real numbers"),
    ("GaussianNoise", {"variance": "0.1"}, "the variance of the noise must be a real number; got '0.1'"),
    ("GaussianNoise", {"variance": [0.1, 0.2]}, "the variance of the noise must be one number"),
    ("Splits", {"step": 0}, "step must be at least 1; got 0"),
    ("Splits", {"center": ""}, "center must be one of None, 'mean', 'median'; got ''"),
    ("Splits", {"correction": ""}, "correction must be one of"),
    ("conformal", {"score": ""}, "score must be one of"),
    ("conformal", {"rule": ""}, "rule must be one of"),
    ("crude", {"neighbors": 2.5}, f"neighbors {WHOLE}; got 2.5"),
    ("neural_quantiles", {"patience": NAN}, f"patience {WHOLE}"),
]


def answers():
    """What every case is answered: a message, or nothing."""
    for name, option, _ in CASES:
        try:
            METHODS[name](**option)
        except ValueError as error:
            yield str(error)
        else:
            yield "nothing"


@pytest.mark.skipif(jax.config.jax_enable_x64, reason="what is 0 depends on the precision")
def test_each_is_refused():
    """In a process of its own: here annotations are checked, before the options are."""
    run = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=True)
    for (name, option, message), answer in zip(CASES, json.loads(run.stdout), strict=True):
        assert message in answer, (name, option)


if __name__ == "__main__":
    print(json.dumps(list(answers())))
