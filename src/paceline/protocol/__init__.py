"""The rules of a run as state machines: an event in, a list of actions out.

Nothing here opens a socket, starts a thread, reads a clock or touches a tensor: time comes in with
the events, payloads are opaque handles. A thin shell runs these objects over real processes.
"""
