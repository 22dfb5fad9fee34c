"""DeepSpeed's ZeRO-3 with our own optimizer step and parameter swapper: what moves bytes is ours, the rest DeepSpeed's.

`binding` is the only module that replaces anything in DeepSpeed; it refuses versions it was not tested with. Where to
look: `plan` and `sizes` say what lives where, `session` opens memory and files, `homes` is the set-up of the optimizer
and `optimizer` its gradients and step, `states` the update, `params` the swapper with `param_store` (places and
transfers) and `loans`, `gradients` those on the drive."""
