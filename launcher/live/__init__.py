"""The live view of a job: what its ranks count, gathered at the launcher while they run.

job_view     what is known of the job; pure
stragglers   who makes the others wait, and why; pure
snapshot     the job at one moment as a plain dict: what is shown of it; pure
prometheus   the numbers in the format of Prometheus (--metrics-port)
table        the job as a table for a terminal (--live)
history      what the ranks have done since the job began; pure
page         the job as a page of a browser (--live-page, --live-report)
viewer       what a person does with the table: chooses a rank, and asks by keys
keyboard     keys of a terminal
live_view    holds these together for one job
"""
