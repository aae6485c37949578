"""`python -m jaxcal` is the command `jaxcal`."""

from jaxcal.cli import main

if __name__ == "__main__":
    main()
