"""The planned part as a graph on local tensors.

moves     a tensor from one layout to another, and its gradient back
builder   nodes of the graph
lowering  the graph of a plan
"""
