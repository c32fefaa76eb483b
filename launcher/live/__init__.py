"""The live view of a job: what its ranks count, gathered at the launcher while they run.

job_view      what is known of the job; pure, as is
prometheus    the same in the format of Prometheus (--metrics-port)
http_server   answers requests in the launcher's loop
live_view     holds these together for one job
"""
