"""How ranks meet before they are connected: the exchange, and its sources."""
