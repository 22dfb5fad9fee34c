"""From the command line to checked settings, without torch."""

from outcore.train.configure.arguments import parse_config

__all__ = ["parse_config"]
