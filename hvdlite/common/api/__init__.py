"""The collectives as adapters call them, written once for all frameworks."""
