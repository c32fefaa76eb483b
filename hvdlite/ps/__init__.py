"""The parameter server. From top to bottom, each room knows only those below it.

raw_calls, public, context, cli  what users call, and hvdlite-ps
worker                           tables as a worker sees them
server                           serves tables, and saves, loads and moves them
scheduler                        who is there, who keeps what, whose turn it is
cluster, tables                  settings, enrolment and membership; one table: when pushes count
connections                      messages, and how they are sent, by common.connections
layouts                          which part of which tensor lies where
"""
