"""The streaming engine: every layer of a decoder passes through the GPU, its home is RAM.

Where to look: `build` puts an engine together, `engine` is the training step and its clipping, `schedule` the order of
things within a step, `units` how a model is taken apart (`shell`, `layout`), `runner` how one unit runs (`compiled`,
`structure`, `accumulator`), `prefetch` and `slots` how weights arrive, `gradients` how gradients leave, `homes` where
both live, `residency` where activation checkpoints wait, `updates` what the CPU optimizer is at, `state` checkpoints,
`check` whether a model can be streamed.
"""
