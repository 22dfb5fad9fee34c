"""DeepSpeed's ZeRO-3 with our own optimizer step and parameter swapper: what moves bytes is ours, the rest DeepSpeed's.

`binding` is the only module that replaces anything in DeepSpeed; it refuses versions it was not tested with.
"""
