"""Tests of the command line, also under the names of Horovod."""
