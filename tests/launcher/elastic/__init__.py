"""Tests of elastic jobs: the launcher's part."""
