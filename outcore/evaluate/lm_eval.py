"""The harness's own command line with our engine among its models: `python -m outcore.evaluate.lm_eval --model outcore
--model_args pretrained=MODEL,preset=throughput --tasks hellaswag`. Everything else is as `lm_eval` has it."""

from __future__ import annotations

import sys

from outcore.evaluate.tasks import check_harness


def main() -> None:
    """Register the model, then be `lm_eval`."""
    try:
        check_harness()
    except ValueError as error:
        sys.exit(f"outcore: {error}")
    from lm_eval.__main__ import cli_evaluate

    from outcore.evaluate.harness import register

    register()
    cli_evaluate()


if __name__ == "__main__":
    main()
