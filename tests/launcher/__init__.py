"""Tests of hvdlite-run, hvdlite.run and the drop-in."""
