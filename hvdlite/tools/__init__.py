"""Command-line tools: readers of the files of a finished job, and trials of an installation."""
