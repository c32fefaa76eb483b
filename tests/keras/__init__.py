"""hvdlite.keras, its ranks as threads of one process."""
