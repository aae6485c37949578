"""`python -m jaxcal` is the command `jaxcal`."""

from jaxcal.cli import app

if __name__ == "__main__":
    app(prog_name="jaxcal")
