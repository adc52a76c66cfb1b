"""Flags of `coldframe rollout run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coldframe.harnesses import harness_names
from coldframe.rollouts.settings import DEFAULT_API_KEY_ENV
from coldframe.trajectories.calls import Level

Tasks = Annotated[
    list[Path],
    typer.Argument(metavar="TASKS...", help="Task directories, or directories of them."),
]
Harness = Annotated[
    str, typer.Option(help=f"{', '.join(harness_names())}, or package.module:Class.")
]
Samples = Annotated[int, typer.Option(help="Samples of each task.")]
Concurrency = Annotated[int, typer.Option(help="Attempts at a time.")]
Attempts = Annotated[
    int, typer.Option(help="Tries of one sample, when the platform's fault may pass.")
]
Model = Annotated[str | None, typer.Option(help="The model's name at the endpoint.")]
BaseUrl = Annotated[
    str | None, typer.Option(help="Of an OpenAI-compatible API, such as http://HOST/v1.")
]
ApiKeyEnv = Annotated[
    str | None,
    typer.Option(help=f"Variable that holds the key; default {DEFAULT_API_KEY_ENV} if set."),
]
Temperature = Annotated[float | None, typer.Option(help="Of sampling.")]
MaxTokens = Annotated[int | None, typer.Option(help="Of one answer.")]
Seed = Annotated[int | None, typer.Option(help="Sample k is seeded with SEED + k.")]
PolicyVersion = Annotated[
    str | None,
    typer.Option(help="Digest of the weights that act; --capture tokens needs it."),
]
Tokenizer = Annotated[str | None, typer.Option(help="Its name and version; recorded only.")]
Renderer = Annotated[
    str | None, typer.Option(help="Chat template, name and version; recorded only.")
]
Capture = Annotated[
    Level | None,
    typer.Option(
        help="Keep what the engine says of its tokens, exactly; only `tokens` can be trained "
        "on. Default: keep texts."
    ),
]
Steps = Annotated[int, typer.Option(help="Limit on actions of the model.")]
Tokens = Annotated[
    int | None, typer.Option(help="Limit on tokens that the model produces in an attempt.")
]
Wall = Annotated[
    float, typer.Option(help="Limit on the agent's time in seconds; a task's own may be less.")
]
CommandDeadline = Annotated[float, typer.Option(help="Limit on one command in seconds.")]
RequestTimeout = Annotated[
    float, typer.Option(help="Limit on one answer of the endpoint in seconds.")
]
Out = Annotated[Path | None, typer.Option(help="The run's directory; default runs/TIME-HARNESS.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the run in --out, which must be there.")
]
SummaryJson = Annotated[
    bool, typer.Option("--json", help="Print the summary as one JSON object at the end.")
]
