"""Tests of the node agent: real processes, real sockets, a stub libnvidia-ml."""
