"""Programs that run on other machines: each one file, sent over SSH, Python's own library only.

They are read as text, never imported over there, and must run on Python 3.7 and newer: an old
Python is something that doctor tells, not something it fails on.
"""
