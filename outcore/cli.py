"""`outcore`: the console command; each subcommand is one room's door, opened only when it is called."""

from __future__ import annotations

import atexit
import gc
import importlib
import sys
from collections.abc import Mapping
from types import MappingProxyType

from outcore.common.errors import broken_package
from outcore.common.output import STARTING, told_when_slow, watch_reader
from outcore.common.words import nearest
from outcore.config.commands import check_flags

COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "train": ("outcore.train.command", "train a model"),
        "runs": ("outcore.runs.listing", "the runs here with state, step, loss and size; delete one"),
        "plan": ("outcore.plan.main", "will a model fit this machine, how fast, what to change"),
        "setup": ("outcore.install.command", "is every part there and does it work; in a clone: install, too"),
        "probe": ("outcore.probe.command", "measure this machine once, for forecasts"),
        "check": ("outcore.performance.command", "before a long run: will it fit, how fast, GO or NO-GO"),
        "machine": ("outcore.machine.command", "this computer, its GPUs and what joins them"),
        "data": ("outcore.data.main", "how rows are read, and which of their tokens bear loss"),
        "generate": ("outcore.infer.commands.generate", "text by a model of any size: a prompt, or a job over a file"),
        "chat": ("outcore.infer.commands.chat", "talk with a model of any size, or with the one just trained"),
        "score": ("outcore.infer.commands.score", "log-probabilities of texts and perplexity"),
        "evaluate": ("outcore.evaluate.commands.evaluate", "scores by lm-evaluation-harness, for a model of any size"),
        "evaluations": ("outcore.evaluate.commands.evaluations", "what was evaluated: list, show, diff, export"),
        "serve": ("outcore.evaluate.commands.serve", "OpenAI's and Anthropic's API for a model of any size"),
        "start": (
            "outcore.serve.handover.start",
            "claude, codex, opencode, aider or open-webui on a model of this machine",
        ),
        "ui": ("outcore.ui.command", "all of it in the browser: train, watch, chat, evaluate, the machine"),
        "models": ("outcore.engine.stream.check.command", "which architectures stream, and what goes with them"),
        "export": ("outcore.checkpoint.main", "a checkpoint as a model that from_pretrained loads, without a GPU"),
        "verify": ("outcore.performance.verify", "steps of a run taken again from a checkpoint: are the bits the same"),
        "watch": ("outcore.monitor.screen.frame", "a running or finished run, live in the terminal"),
    }
)
"""Name -> (module with `main(argv) -> int`, what it is for)."""


GO_ON = ("train", "serve", "start", "ui", "evaluate", "export", "verify", "setup", "probe", "check")
"""Commands that do more than print: they go on when nobody reads along."""


def usage() -> str:
    """The list of subcommands."""
    lines = ["usage: outcore COMMAND [...]", "", "commands:"]
    lines += [f"  {name:<11} {words}" for name, (_, words) in COMMANDS.items()]
    lines += ["", "outcore COMMAND --help tells more; RUN is a run's name or its folder."]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return its exit code; 2 for an unknown one, 130 after Ctrl-C."""
    args = sys.argv[1:] if argv is None else argv
    watch_reader(ends=not args or args[0] not in GO_ON)
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage(), file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    if args[0] == "--version":
        from outcore import __version__

        print(f"outcore {__version__}")
        return 0
    name = args[0]
    if name not in COMMANDS:
        near = nearest(name, COMMANDS, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        print(f"outcore: unknown command {name!r}.{hint} Commands: {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    atexit.register(gc.freeze)  # a last look through all objects, which nobody needs, takes a second of a core
    check_flags(name, args[1:])  # before the room is opened: its imports take seconds
    try:
        with told_when_slow(STARTING):
            room = importlib.import_module(COMMANDS[name][0])
        code = int(room.main(args[1:]))
    except KeyboardInterrupt:
        print(f"\noutcore {name}: stopped by Ctrl-C", file=sys.stderr)
        code = 130
    except (ImportError, OSError) as error:
        words = broken_package(error)
        if words is None:
            raise
        print(f"outcore {name}: {words}", file=sys.stderr)
        code = 1
    sys.stdout.flush()
    return code


if __name__ == "__main__":
    sys.exit(main())
