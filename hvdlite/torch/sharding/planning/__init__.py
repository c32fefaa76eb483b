"""A module is run without values, and strategies are found for all of its operators.

calls    operators as they run
notes    what is noted of each
record   which of them a module runs
tracing  the run on meta tensors that it is made of
plans    how all are cut, and what it costs
planner  the strategies for them
"""
