"""The catalog: sources, licenses and originals of all data sets."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Original:
    """A published text file of numbers, and the way to read it.

    Attributes:
        delimiter: the mark between columns, in a file whose first line has their names. None for white space, in a file
            without such a line.
    """

    url: str
    sha256: str
    columns: str
    targets: tuple[str, ...]
    delimiter: str | None = None
    levels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def file(self) -> str:
        """The name of the file in the cache."""
        return self.url.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Entry:
    """A data set of the catalog. If it has several targets, each target has its own name."""

    source: str
    license: str | None = "CC BY 4.0"
    targets: tuple[str, ...] = ()
    original: Original | None = None


_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases"
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

_YACHT = Original(
    url=f"{_UCI}/00243/yacht_hydrodynamics.data",
    sha256="00dfecc0fc01ddd4c90b558a3ac11b246df8ebcfea130724223475a9a67f0ea1",
    columns="longitudinal_position_of_buoyancy_centre prismatic_coefficient length_displacement_ratio "
    "beam_draught_ratio length_beam_ratio froude_number residuary_resistance_per_unit_displacement",
    targets=("residuary_resistance_per_unit_displacement",),
)
_AIRFOIL = Original(
    url=f"{_UCI}/00291/airfoil_self_noise.dat",
    sha256="74c75fd71783f1e6b71f8a622b993dc592897a97cd689c5090a07147a1b097b3",
    columns="frequency_hz angle_of_attack_deg chord_length_m free_stream_velocity_m_s "
    "suction_side_displacement_thickness_m scaled_sound_pressure_level_db",
    targets=("scaled_sound_pressure_level_db",),
)
_WINE_RED = Original(
    url=f"{_UCI}/wine-quality/winequality-red.csv",
    sha256="4a402cf041b025d4566d954c3b9ba8635a3a8a01e039005d97d6a710278cf05e",
    columns="fixed_acidity volatile_acidity citric_acid residual_sugar chlorides free_sulfur_dioxide "
    "total_sulfur_dioxide density ph sulphates alcohol quality",
    targets=("quality",),
    delimiter=";",
)
_WINE_WHITE = replace(
    _WINE_RED,
    url=f"{_UCI}/wine-quality/winequality-white.csv",
    sha256="76c3f809815c17c07212622f776311faeb31e87610d52c26d87d6e361b169836",
)
_PROTEIN = Original(
    url=f"{_UCI}/00265/CASP.csv",
    sha256="4277cfcb4e91a181746cbc654f001b57951c9e6a80f4f795fdb5c807e0848f40",
    columns="RMSD F1 F2 F3 F4 F5 F6 F7 F8 F9",
    targets=("RMSD",),
    delimiter=",",
)
_FOREST_FIRES = Original(
    url=f"{_UCI}/forest-fires/forestfires.csv",
    sha256="0d6586a1fa52f55bef48578aef14eb97273f1e9330e1a53423df497a77065253",
    columns="X Y month day FFMC DMC DC ISI temp RH wind rain area_ha",
    targets=("area_ha",),
    delimiter=",",
    levels={"month": _MONTHS, "day": _DAYS},
)
_PARKINSONS = Original(
    url=f"{_UCI}/parkinsons/telemonitoring/parkinsons_updrs.data",
    sha256="f2c7d5025dec4e92e7feae367a5f7ccf58789a10ac6b54bdf15976c599f9dd39",
    columns="subject# age sex test_time motor_UPDRS total_UPDRS Jitter(%) Jitter(Abs) Jitter:RAP Jitter:PPQ5 "
    "Jitter:DDP Shimmer Shimmer(dB) Shimmer:APQ3 Shimmer:APQ5 Shimmer:APQ11 Shimmer:DDA NHR HNR RPDE DFA PPE",
    targets=("motor_UPDRS", "total_UPDRS"),
    delimiter=",",
)

_WINE_SOURCE = "UCI: Wine Quality; P. Cortez et al. (2009); doi:10.24432/C56S3T"
_NAVAL_SOURCE = "UCI: Naval Propulsion Plants; A. Coraddu et al. (2014); doi:10.24432/C5K31K"

ENTRIES = {
    "diabetes": Entry("B. Efron, T. Hastie, I. Johnstone, R. Tibshirani (2004), Least Angle Regression", None),
    "yacht": Entry(
        "UCI: Yacht Hydrodynamics; J. Gerritsma, R. Onnink, A. Versluis (1981); doi:10.24432/C5XG7R", original=_YACHT
    ),
    "energy": Entry(
        "UCI: Energy Efficiency; A. Tsanas, A. Xifara (2012); doi:10.24432/C51307",
        targets=("energy_heating", "energy_cooling"),
    ),
    "airfoil": Entry(
        "UCI: Airfoil Self-Noise; T. Brooks, D. Pope, M. Marcolini (1989); doi:10.24432/C5VW2C", original=_AIRFOIL
    ),
    "concrete": Entry("UCI: Concrete Compressive Strength; I-C. Yeh (1998); doi:10.24432/C5PK67"),
    "wine_red": Entry(_WINE_SOURCE, original=_WINE_RED),
    "wine_white": Entry(_WINE_SOURCE, original=_WINE_WHITE),
    "power_plant": Entry("UCI: Combined Cycle Power Plant; P. Tufekci, H. Kaya (2014); doi:10.24432/C5002N"),
    "protein": Entry(
        "UCI: Physicochemical Properties of Protein Tertiary Structure; P. Rana (2013); doi:10.24432/C5QW3H",
        original=_PROTEIN,
    ),
    "forest_fires": Entry(
        "UCI: Forest Fires; P. Cortez, A. Morais (2007); doi:10.24432/C5D88D", original=_FOREST_FIRES
    ),
    "auto_mpg": Entry("UCI: Auto MPG; R. Quinlan (1993); doi:10.24432/C5859H"),
    "boston": Entry("StatLib: Boston housing; D. Harrison, D. L. Rubinfeld (1978)", None),
    "kin8nm": Entry("DELVE: kin8nm (OpenML 189); University of Toronto (1996)", None),
    "parkinsons": Entry(
        "UCI: Parkinsons Telemonitoring; A. Tsanas, M. Little (2009); doi:10.24432/C5ZS3N",
        targets=("parkinsons_motor", "parkinsons_total"),
        original=_PARKINSONS,
    ),
    "grid_stability": Entry("UCI: Electrical Grid Stability Simulated Data; V. Arzamasov (2018); doi:10.24432/C5PG66"),
    "naval": Entry(_NAVAL_SOURCE, targets=("naval_compressor", "naval_turbine")),
    "cbm": Entry(_NAVAL_SOURCE),
    "appliances": Entry("UCI: Appliances Energy Prediction; L. Candanedo (2017); doi:10.24432/C5VC8G"),
    "election": Entry("UCI: Real-time Election Results: Portugal 2019; N. Moniz (2019)", None),
    "steel": Entry("UCI: Steel Industry Energy Consumption; V. E. Sathishkumar et al. (2021); doi:10.24432/C52G8C"),
    "beijing_pm25": Entry("UCI: Beijing PM2.5; S. Chen (2015); doi:10.24432/C5JS49"),
    "traffic": Entry("UCI: Metro Interstate Traffic Volume; J. Hogue (2019); doi:10.24432/C5X60B"),
    "blog": Entry("UCI: BlogFeedback, training file; K. Buza (2014); doi:10.24432/C58S3F"),
    "tetuan": Entry("UCI: Power Consumption of Tetouan City; A. Salam, A. El Hibaoui (2018); doi:10.24432/C5B034"),
    "gpu_sgemm": Entry(
        "UCI: SGEMM GPU Kernel Performance; E. Paredes, R. Ballester-Ripoll (2017); doi:10.24432/C5MK70"
    ),
}

NAMES = {
    name: (stem, column) for stem, entry in ENTRIES.items() for column, name in enumerate(entry.targets or (stem,))
}
