"""The command line of hvdlite-run: flags, settings, and every contradiction between them."""
