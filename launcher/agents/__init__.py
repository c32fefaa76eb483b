"""The launcher's side of the agents: starts, connects and briefs them (one is `agent_process`)."""
