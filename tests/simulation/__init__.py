"""The product's own code under a seeded simulator: threads, clock, drive and device are simulated, nothing else.

    python -m tests.simulation --seed N        replays one seed
    python -m tests.simulation --seconds S     draws seeds for so long and prints the first that fails
    python -m tests.simulation --planted       breaks the product in memory, bug by bug, and tells what finds each

`threads` steps the product's threads one at a time and owns the clock; `drive` is a file system that tears, loses,
refuses and loses power; `link` is a device whose copies end later; `worlds` are what the product is made to do."""
