"""What jaxcal's claims rest on: the papers' tables run again, and timings beside peers."""
