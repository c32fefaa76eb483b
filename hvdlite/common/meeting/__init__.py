"""How ranks meet before they are connected: the exchange, its sources, and proofs of identity."""
