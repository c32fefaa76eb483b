"""Every setting of hvdlite, declared once, and the log, whose level and form are settings."""
