"""init and shutdown, process sets, rank and size: which job this process is a rank of."""
