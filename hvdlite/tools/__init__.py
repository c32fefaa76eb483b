"""Command-line tools that read the files of a finished job. No rank imports them."""
