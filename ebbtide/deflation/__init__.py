"""Vocabulary and policies of deflation: pure functions and state machines, no I/O, no clock, no event loop.

The live daemons and the simulator call the same functions, so a policy exists once.
"""
