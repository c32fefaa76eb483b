"""What ranks ask for: entries and their handles, the messages about them, and process sets."""
