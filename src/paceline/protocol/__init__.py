"""The protocol of a run as state machines: events in, lists of actions out.

Nothing here opens a socket, starts a thread, reads a clock or touches a tensor: time is passed with
the events, and payloads are opaque handles. A thin shell runs these objects over real processes.
"""
