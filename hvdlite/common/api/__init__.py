"""The public forms of the collectives, written once for all frameworks."""
