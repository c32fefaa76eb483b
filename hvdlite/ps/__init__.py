"""The parameter server.

layout, clocks, membership      decisions: who keeps what, when updates happen, who is there
messages                        what is sent, checked
channel                         how it is sent: pyzmq, and only there
server, scheduler, client       the three roles
"""
