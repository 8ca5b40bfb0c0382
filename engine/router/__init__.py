"""One OpenAI door in front of several engines, a process of its own: no torch.

Start in server.py (the door), forward.py (one request on its way), choice.py (who gets it);
fleet.py watches the engines, breaker.py takes one out.
"""
