"""Deflation and reinflation of one VM: state machines, pressure and repairs.

`cascade` is the state machine of a deflation, `lanes` has each layer's part of the deadline (`LAYER_ENDS`). `steps`
reckons one step of the balloon or of unplugging; `deflation.floors` says how far they may go.
"""
