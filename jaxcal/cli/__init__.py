"""The command line: `jaxcal demo`, `calibrate`, `apply`, `monitor`, `methods` and `data`."""


def main() -> None:
    """The command `jaxcal`."""
    from jaxcal.cli import interrupt

    interrupt.watch()
    from jaxcal.cli.app import app

    app(prog_name="jaxcal")
