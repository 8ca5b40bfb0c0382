"""Who is out there: nodes, agents, engines, commands, and the agents' API.

Services write, selectors read. May import accounts, tracing, gpu_agent.protocol.
"""
