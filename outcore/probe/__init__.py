"""The probe: which path bytes really take between drive, RAM and GPU here, and how fast each link is.

Two halves. The *ladder* (`facts`, `verdict`, `ladder`) finds out whether GPUDirect Storage works on this machine and
says why not; the *benchmarks* (`*_bench`) measure every link, `recommend` turns the figures into settings and `report`
writes them down. `optimizer` runs all of it behind `gds_optimizer.py`.

Nothing heavy is imported here, so that the child process of the decisive test starts quickly."""
