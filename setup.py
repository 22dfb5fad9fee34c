"""python setup.py: install outcore, build what it needs, verify every part. Not a build script (see pyproject.toml).

  python setup.py              set up this machine; a second run only verifies
  python setup.py --check      verify only           --json      the report as JSON
  python setup.py --dry-run    say what would be done --help     everything else
  python setup.py --deepspeed  build what --engine deepspeed needs, too
  python setup.py --run        set up, then train the embedded default
  python setup.py --test       set up with the test tools, then run the tests

Standard library only, and nothing here that an old Python cannot parse: it must get as far as the line below.
"""

import os
import sys

if sys.version_info < (3, 11):
    sys.exit(
        "outcore needs Python 3.11, 3.12 or 3.13, this is %d.%d: start it as `python3.11 setup.py`"
        % sys.version_info[:2]
    )

REPOSITORY = os.path.dirname(os.path.abspath(__file__))


def main():
    sys.path.insert(0, REPOSITORY)
    from outcore.common.output import watch_reader
    from outcore.install.job import InstallJob

    watch_reader(ends=False)  # an installation goes on when nobody reads along
    with InstallJob(sys.argv[1:], REPOSITORY) as job:  # an error ends here, as one message and an exit code
        job.detect()  # OS, GPU, driver, CUDA -> the matching set of pinned packages
        if job.options.dry_run:
            job.print_plan()
            return job.exit_code
        if not job.options.check:
            job.install_packages()  # virtual environment and what a run needs; the CPU kernels compile meanwhile
            job.run()  # --run: before all that it does not need
            job.install_deepspeed()  # its package; its C++ extensions, where its engine is asked for
        job.verify()  # every part used once, for real
        job.report()  # table, setup_report.json, what to fix
        job.follow_up()  # --test
    return job.exit_code


if __name__ == "__main__":
    sys.exit(main())
