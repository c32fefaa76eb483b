"""What a person may ask of a running job, on the terminal of hvdlite-run or by hvdlite-top.

requests         the requests, and what answers them
asking           asks ranks for what they alone know
tensor_calls     the last calls of one tensor, from the answers of its ranks; pure
service          the socket at which hvdlite-top asks
runtime_folder   where the sockets of running jobs are
"""
