"""The launcher's side of the agents: how they are started, connected with, and told what to run."""
