"""The iteration trace: what every rank did in every training iteration."""
