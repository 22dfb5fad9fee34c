"""`outcore generate MODEL`: one prompt answered as it is written, or a file of them answered line by line."""

from __future__ import annotations

import argparse

from outcore.common.files import json_of
from outcore.common.output import printable, say, show, tell_error
from outcore.common.quantities import counted
from outcore.config.commands import generate_flags
from outcore.infer.commands.job import JobCounts, job_of, run_job
from outcore.infer.commands.journal import Journal, digest_of, why_failed
from outcore.infer.commands.lines import numbered
from outcore.infer.commands.options import check_output, sampling_fields, sampling_from, settings_of, tell_plan
from outcore.infer.commands.over_gpus import check_gpus, gather, run_over_gpus
from outcore.infer.commands.seeing import answer_about
from outcore.infer.opening import InferSettings, against_plan, open_engine
from outcore.infer.requests import Prompts, Request, Sampling, sampling_of


def main(argv: list[str] | None = None) -> int:
    """The subcommand; returns its exit code."""
    args = generate_flags().parse_args(argv)
    try:
        if (args.prompt is None) == (args.input is None):
            raise ValueError("give either --prompt TEXT, or --input FILE with --output FILE.")
        sampling_of(sampling_fields(args), Sampling())  # what cannot be is refused before a model is read
        if args.prompt is not None:
            return _one(args)
        return _job(args)
    except (ValueError, RuntimeError, OSError) as error:
        return tell_error("generate", error)


def _one(args: argparse.Namespace) -> int:
    if args.num_gpus != 1:
        raise ValueError("--num_gpus shares the lines of --input; one --prompt is answered by one GPU.")
    if args.output is not None:
        raise ValueError("--output goes with --input; an answer to --prompt is printed.")
    if args.image:
        return answer_about(args, args.prompt)
    opened = open_engine(args.model, settings_of(args, deterministic=args.deterministic), say)
    told = against_plan(opened)
    try:
        prompts = Prompts(opened.found.tokenizer)
        if args.chat:
            ids = prompts.of_messages([{"role": "user", "content": args.prompt}])
        else:
            ids = prompts.of_text(args.prompt)
        sampling = sampling_from(opened, sampling_fields(args))(len(ids))
        request = Request("prompt", ids, sampling, goes_on=not args.chat)
        for answer in opened.engine.generate([request], lambda piece: show(piece.text)):
            print(flush=True)
            if answer.finish == "error":
                raise RuntimeError(answer.error)
            times, written = answer.timings, len(answer.tokens)
            writing_s = max(1e-9, times.total_s - times.first_token_s)
            say(
                f"{counted(len(ids), 'token')} read, first word after {times.first_token_s:.2f} s, "
                f"{counted(written, 'token')} written at {max(0, written - 1) / writing_s:.1f} tokens/s, "
                f"ended by {answer.finish}"
            )
        tell_plan(told, "generate")
    finally:
        opened.close()
    return 0


def _job(args: argparse.Namespace) -> int:
    if args.output is None:
        raise ValueError("--input needs --output FILE for the answers.")
    if args.chat:
        raise ValueError("--chat goes with --prompt; lines of a file have messages instead.")
    if args.image:
        raise ValueError("--image goes with --prompt; a job over a file is of text.")
    if not args.input.is_file():
        raise ValueError(f"--input {args.input} is no file.")
    if next(numbered(args.input), None) is None:
        raise ValueError(f"--input {args.input} has no lines.")
    check_output(args.output, args.input)
    settings = settings_of(args, deterministic=args.deterministic)
    check_gpus(args.num_gpus, settings)
    job = job_of(args.model, args.adapter or "", digest_of(args.input), settings, sampling_fields(args))
    journal_file = args.output.with_name(f"{args.output.name}.journal")
    if args.output.exists() and not args.overwrite and not journal_file.exists():
        return _tell_finished(args)
    journal = Journal(args.output, job)
    try:
        gather(journal, job)
        if journal.done:
            say(f"going on: {counted(len(journal.done), 'line')} answered already")
        counts = run_over_gpus(args, settings, job, journal) if args.num_gpus > 1 else _on_one(args, settings, journal)
    except KeyboardInterrupt:
        say("what is answered is kept; the same command goes on from there")
        raise
    finally:
        journal.close()
    rate = counts.answer_tokens / max(1e-9, counts.seconds)
    say(
        f"{args.output}: {counted(counts.lines, 'line')} ({counts.from_journal:,} from before, "
        f"{len(journal.failed):,} failed), {counted(counts.answer_tokens, 'token')} at {rate:.1f} tokens/s"
    )
    if journal.failed:
        say(f"the first that failed: {printable(journal.why)}")
    return 1 if journal.failed else 0


def _tell_finished(args: argparse.Namespace) -> int:
    """Say what a job that has ended left; its exit code. ValueError where it was another input's."""
    with open(args.output, encoding="utf-8") as file:
        errors = [why_failed(json_of(line)) for line in file]
    asked = sum(1 for _ in numbered(args.input))
    if len(errors) != asked:
        raise ValueError(
            f"{args.output} is there already with {counted(len(errors), 'line')}, and --input has {asked:,}: it is of "
            "another input. --overwrite answers again, or name another --output."
        )
    failed = [f"row {number}: {why}" for number, why in enumerate(errors, 1) if why]
    words = f", {len(failed):,} of its lines failed (the first: {printable(failed[0])})" if failed else ""
    say(
        f"{args.output} is there already and no journal beside it: a job ended there{words}. --overwrite answers again."
    )
    return 1 if failed else 0


def _on_one(args: argparse.Namespace, settings: InferSettings, journal: Journal) -> JobCounts:
    opened = open_engine(args.model, settings, say)
    told = against_plan(opened)
    try:
        defaults = sampling_from(opened, sampling_fields(args))
        counts = run_job(opened, args.input, journal, defaults, args.model, say)
        tell_plan(told, "job")
        return counts
    finally:
        opened.close()
