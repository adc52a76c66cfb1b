"""`coldframe rollout`: run a batch of tasks, and look at what came out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import typer

from coldframe.cli import render
from coldframe.cli import rollout_flags as flags
from coldframe.cli.attempt_view import attempt_text
from coldframe.cli.groups import group
from coldframe.cli.progress import BatchProgress
from coldframe.cli.run_view import ATTEMPTS, brief, refusals, row, summary_table, without_summary
from coldframe.harnesses.base import Limits, ModelSettings
from coldframe.learning.captured import shaping
from coldframe.protocol.errors import CapabilityError, InvalidRequestError, RunError
from coldframe.protocol.text import lacking
from coldframe.rollouts.capture import ModelCapture
from coldframe.rollouts.config import RunConfig
from coldframe.rollouts.directory import RunDirectory, open_run
from coldframe.rollouts.run import Batch, RunResult
from coldframe.rollouts.settings import RolloutSettings
from coldframe.trajectories.calls import Level

EXIT_NO_VERDICT = 1
EXIT_RECOVERED = 3
app = group()


@app.command("run")
def run(
    tasks: flags.Tasks,
    harness: flags.Harness = "react",
    samples: flags.Samples = 1,
    concurrency: flags.Concurrency = 2,
    attempts: flags.Attempts = 2,
    model: flags.Model = None,
    base_url: flags.BaseUrl = None,
    api_key_env: flags.ApiKeyEnv = None,
    temperature: flags.Temperature = None,
    max_tokens: flags.MaxTokens = None,
    seed: flags.Seed = None,
    policy_version: flags.PolicyVersion = None,
    tokenizer: flags.Tokenizer = None,
    renderer: flags.Renderer = None,
    capture: flags.Capture = None,
    steps: flags.Steps = 100,
    tokens: flags.Tokens = None,
    wall: flags.Wall = 7200.0,
    command_deadline: flags.CommandDeadline = 180.0,
    request_timeout: flags.RequestTimeout = 300.0,
    out: flags.Out = None,
    resume: flags.Resume = False,
    as_json: flags.SummaryJson = False,
) -> int:
    """Run tasks with an agent harness, grade them, and keep a trajectory of every attempt.

    The same --out again goes on with the run: only what has no result is made. Exit code: 0
    every attempt ended in a verdict; 3 every sample has a verdict, but after a retry; 1 some
    sample has none, a task was refused, or the engine gives less than --capture asks; 2 the
    command line is wrong; 130 interrupted.
    """
    settings = RolloutSettings.from_environment()
    config = RunConfig(
        tasks=tuple(tasks),
        harness=harness,
        samples=samples,
        concurrency=concurrency,
        attempts=attempts,
        limits=Limits(steps=steps, tokens=tokens, wall_s=wall, command_s=command_deadline),
        model=_model(
            settings,
            model,
            base_url,
            api_key_env,
            temperature=temperature,
            max_tokens=max_tokens,
            seed=seed,
            request_s=request_timeout,
            policy_version=policy_version,
            tokenizer=tokenizer,
            renderer=renderer,
        ),
        api_key_env=api_key_env,
        seed=seed,
        capture=None if capture is None else capture.value,
    )
    root = out or Path("runs") / f"{time.strftime('%Y%m%dT%H%M%S')}-{harness.split(':')[-1]}"
    directory = RunDirectory(root)
    if resume and not directory.exists:
        raise RunError(f"{root}: --resume was given, but there is no run")
    result = asyncio.run(_run(config, directory, settings))
    if as_json:
        print(json.dumps(result.summary))
    else:
        print(summary_table(result.summary))
        print(f"\n{root}")
    return exit_code(result)


def _model(
    settings: RolloutSettings,
    name: str | None,
    base_url: str | None,
    api_key_env: str | None,
    **sampling: Any,
) -> ModelSettings | None:
    if name is None and base_url is None:
        return None
    if name is None or base_url is None:
        raise InvalidRequestError("--model and --base-url are given together, or neither")
    if not base_url.startswith(("http://", "https://")):
        raise InvalidRequestError(
            f"--base-url {base_url!r} does not begin with http:// or https://"
        )
    return ModelSettings(
        name=name, base_url=base_url, api_key=settings.api_key(api_key_env), **sampling
    )


async def _run(config: RunConfig, directory: RunDirectory, settings: RolloutSettings) -> RunResult:
    from coldframe.client import AsyncSandboxClient
    from coldframe.client._address import url_of_environment

    me = asyncio.current_task()
    assert me is not None
    # A job scheduler ends us with SIGTERM: the sandboxes are deleted then too.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, me.cancel)
    # A node of its own, unless a service is named: its sandboxes end with the run, killed or not.
    with BatchProgress() as progress:
        async with (
            _captured(config) as capture,
            AsyncSandboxClient(in_process=url_of_environment() is None) as client,
        ):
            batch = Batch(
                client,
                config,
                directory,
                host_env=settings.host_env,
                progress=progress,
                capture=capture,
            )
            try:
                return await batch.run()
            except asyncio.CancelledError:
                progress.note(f"interrupted; go on with --out {directory.root} --resume")
                raise KeyboardInterrupt from None


def _check_trainable(model: ModelSettings) -> None:
    """Refuse now what the contract would refuse of every attempt after hours of them.

    Raises:
        InvalidRequestError: which weights sample, or how, is not said.
    """
    missing = []
    if model.policy_version is None:
        missing.append("which weights act, --policy-version sha256:...")
    if not shaping(model.sampling()):
        missing.append(
            "how is sampled, such as --temperature 1 (the engine's own defaults are not known)"
        )
    if missing:
        raise InvalidRequestError(
            f"--capture tokens: say {'; and '.join(missing)}: "
            "else nothing of this could be trained on"
        )


@contextlib.asynccontextmanager
async def _captured(config: RunConfig) -> AsyncIterator[ModelCapture | None]:
    """Start what captures, if that is asked for: a proxy of this process, on loopback."""
    model = config.model
    if config.capture is None:
        yield None
        return
    if model is None:
        raise InvalidRequestError("--capture: there is no model; give --model and --base-url")
    level = Level(config.capture)
    if level is Level.TOKENS:
        _check_trainable(model)
    try:
        from coldframe.inference.engine import EngineSettings
        from coldframe.inference.local import local_capture
        from coldframe.inference.proxy import ProxySettings
    except ImportError as error:
        raise CapabilityError(lacking("--capture", error, "cli,inference")) from error
    engine = EngineSettings(
        base_url=model.base_url,
        api_key=model.api_key,
        request_s=model.request_s,
        retries=model.retries,
        retry_wait_s=model.retry_wait_s,
    )
    settings = ProxySettings(
        engine=engine,
        model=model.name,
        capture=level,
        policy_version=model.policy_version,
    )
    async with local_capture(settings) as capture:
        yield capture


def exit_code(result: RunResult) -> int:
    """Return the exit code that says how a batch went; see `run`."""
    if result.all_verdicts:
        return 0
    return EXIT_RECOVERED if result.summary["complete"] else EXIT_NO_VERDICT


@app.command("show")
def show(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")],
    attempt: Annotated[
        str | None,
        typer.Option(metavar="TASK.SAMPLE.ATTEMPT", help="Show this attempt's steps instead."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Show whole outputs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Show a run's attempts, finished or not, or the steps of one of them."""
    config, results = open_run(run_directory)
    if attempt is not None:
        found = {str(key): one for key, one in results.items()}
        if attempt not in found:
            known = ", ".join(sorted(found)[:20]) or "none"
            raise InvalidRequestError(f"no attempt {attempt!r} has a result; there are: {known}")
        if as_json:
            print(found[attempt].model_dump_json())
        else:
            print(attempt_text(found[attempt], RunDirectory(run_directory).blobs, full))
        return 0
    summary = RunDirectory(run_directory).summary()
    if as_json:
        attempts = {str(key): brief(one) for key, one in results.items()}
        print(json.dumps({"config": config, "summary": summary, "attempts": attempts}))
        return 0
    rows = [row(key, one) for key, one in results.items()]
    if not rows:
        print("no attempt has a result")
    if rows:
        print(render.table(ATTEMPTS, rows))
    if summary is None:
        print(f"\n{without_summary(config)}")
    else:
        print("", *refusals(summary), summary_table(summary), sep="\n")
    refused_all = summary is not None and not rows and bool(summary["refused"])
    return 1 if refused_all else 0
