"""The console command hvdlite-top: the running jobs of this user, each as a table with keys.

connection   finds running jobs, and asks them
pages        what a person sees: the list of jobs, and one of them
cli          the command line
"""
