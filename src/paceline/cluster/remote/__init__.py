"""Programs that run on other machines, each a single file that uses the standard library only.

They are sent over SSH as source text, never imported remotely, and must run on Python 3.7 and
newer: doctor reports an old Python instead of failing on it.
"""
