"""Who is in a cluster: what a process is told, how it enrols, and who counts as lost."""
