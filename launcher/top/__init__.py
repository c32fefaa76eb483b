"""The console command hvdlite-top: the running jobs of this user, each as a table with keys.

connection   finds running jobs, and asks them
screen       the whole terminal
cli          the command line
"""
