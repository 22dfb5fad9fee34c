"""The streaming engine: every layer of a decoder passes through the GPU, its home is RAM or NVMe.

Where to look: `blueprint` decides what an engine is to be, `build` puts it together, `engine` is the training step and
its clipping, `schedule` the order of things within a step, `units` what a model is taken apart into (`discovery`,
`shell`, `layout`), `runner` how one unit runs (`compiled`, `structure`, `accumulator`), `prefetch` and `slots` how
weights arrive, `gradients` how gradients leave, `homes` where weights and states live (`placement`: which chunk where,
`state_ring`: those on NVMe, `scratch`, docs/residency.md), `gradient_arena` where gradients wait, `activations` where
activation checkpoints do, `updates` what the CPU optimizer is at, `state` checkpoints, `check` whether a model can be
streamed.
"""
