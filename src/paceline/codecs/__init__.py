"""Codecs: flat gradients to small messages and back, with error feedback.

A codec is a spec in `spec.py` (what it is called, how many bytes it sends) and a coder (the
arithmetic), joined by a record in `registry.py`; coders are imported on first use.

A *payload* is a short list of plain tensors that own their memory. Decoding uses only operations
that IEEE arithmetic fixes to the last bit (copies, single multiplications and additions), so the
same payload gives the same tensor on every machine, whatever its processor and thread count.
Everything lives in host memory.

NaN and infinite gradients raise `NonFiniteGradient`: a scale or selection computed from them would
corrupt a whole chunk, or every later message through the residual.
"""
