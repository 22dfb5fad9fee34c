"""Before a long run: is this machine healthy, does the run fit, how fast will it be - by trying it, and saying so.

`performance_test.py` is this room's door. A few steps of the real run (same flags, same engine, same data) are taken in
a child process, measured, set against the planner's forecast term by term, and summed up in one verdict."""
