"""What each instruction changes in an image's configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import reduce

import pytest

from coldframe.images.arguments import Arguments
from coldframe.images.base import Healthcheck, HistoryEntry, ImageConfig
from coldframe.images.configure import configure
from coldframe.images.dockerfile import parse
from coldframe.images.store import ImageStore, image_digest
from coldframe.images.variables import WordError
from coldframe.protocol.errors import DockerfileError


def _configured(text: str) -> ImageConfig:
    lines = parse("FROM x\n" + text, "D")[1:]
    return reduce(lambda made, line: configure(made, line, {"V": "v w"}), lines, ImageConfig())


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("CMD echo $V", {"cmd": ("/bin/sh", "-c", "echo $V")}),
        ('CMD ["a", "$V"]', {"cmd": ("a", "$V")}),
        ("CMD []", {"cmd": ()}),
        ('ENTRYPOINT ["a"]', {"entrypoint": ("a",)}),
        ("ENTRYPOINT exec top -b", {"entrypoint": ("/bin/sh", "-c", "exec top -b")}),
        (
            'SHELL ["/bin/bash", "-eo", "pipefail", "-c"]\nCMD a',
            {
                "shell": ("/bin/bash", "-eo", "pipefail", "-c"),
                "cmd": ("/bin/bash", "-eo", "pipefail", "-c", "a"),
            },
        ),
        ('SHELL ["/bin/sh", "-c"]', {}),
        ("EXPOSE 80 53/UDP 8000-8010", {"exposed_ports": ("80/tcp", "53/udp", "8000-8010/tcp")}),
        ("EXPOSE 80\nEXPOSE 80/tcp", {"exposed_ports": ("80/tcp",)}),
        ("LABEL a=1 b=\"$V\" 'c d'=e", {"labels": (("a", "1"), ("b", "v w"), ("c d", "e"))}),
        ("LABEL old $V form", {"labels": (("old", "v w form"),)}),
        ("LABEL a=1\nLABEL a=2", {"labels": (("a", "2"),)}),
        ("MAINTAINER Some One", {"labels": (("org.opencontainers.image.authors", "Some One"),)}),
        ("STOPSIGNAL term", {"stop_signal": "SIGTERM"}),
        ("STOPSIGNAL 9", {"stop_signal": "9"}),
        ('VOLUME ["/a b"]\nVOLUME /c /d', {"volumes": ("/a b", "/c", "/d")}),
        ("ENV A=1 B=$A", {"env": (("A", "1"), ("B", ""))}),
        ("ONBUILD RUN a", {"on_build": ("RUN a",)}),
        ("ONBUILD COPY <<E /f\nx\nE", {"on_build": ("COPY <<E /f\nx\nE",)}),
        ("HEALTHCHECK CMD a b", {"healthcheck": Healthcheck(("/bin/sh", "-c", "a b"))}),
        ("HEALTHCHECK CMD a\nHEALTHCHECK NONE", {}),
        (
            "HEALTHCHECK --interval=1m30s --timeout=500ms --start-period=0s "
            '--start-interval=1.5s --retries=7 CMD ["a"]',
            {"healthcheck": Healthcheck(("a",), 90.0, 0.5, 0.0, 1.5, 7)},
        ),
    ],
)
def test_instruction_changes_the_configuration(text: str, changed: dict[str, object]) -> None:
    """Tasks start what the image says, as it says."""
    assert _configured(text) == replace(ImageConfig(), **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("SHELL /bin/bash -c", "write SHELL"),
        ("SHELL []", "write SHELL"),
        ("EXPOSE http", "'http' is no port"),
        ("EXPOSE 70000", "'70000' is no port"),
        ("EXPOSE 90-80", "'90-80' is no port"),
        ("LABEL a", "LABEL a has no value; write LABEL a=VALUE"),
        ("STOPSIGNAL SIGNONE", "'SIGNONE' is no signal"),
        ("VOLUME []", "VOLUME names no path"),
        ("HEALTHCHECK a", "write HEALTHCHECK"),
        ("HEALTHCHECK CMD", "write HEALTHCHECK"),
        ("HEALTHCHECK --interval=5 CMD a", "--interval=5 is no duration"),
        ("HEALTHCHECK --timeout=0s CMD a", "--timeout=0s is no duration"),
        ("HEALTHCHECK --timeout=1y CMD a", "--timeout=1y is no duration"),
        ("HEALTHCHECK --retries=-1 CMD a", "--retries=-1 is no number"),
        ("HEALTHCHECK --retries=3 NONE", "HEALTHCHECK NONE takes nothing else"),
        ("ONBUILD FROM x", "ONBUILD FROM is not possible"),
        ("ONBUILD nonsense", "'NONSENSE' is no instruction"),
    ],
)
def test_line_that_is_not_well_formed_is_refused(text: str, said: str) -> None:
    """A guess would be wrong in silence."""
    with pytest.raises((WordError, DockerfileError), match=said):
        _configured(text)


def test_configuration_survives_the_store(store: ImageStore, add: Callable[..., str]) -> None:
    """It is JSON on disk and tuples here."""
    config = _configured(
        'SHELL ["a"]\nCMD b\nEXPOSE 1\nLABEL c=d\nHEALTHCHECK CMD e\nVOLUME /f\nONBUILD RUN g'
    )
    history = (HistoryEntry("FROM x", resolved="y"), HistoryEntry("RUN g", layer="0"))
    store.tag("mine", [add(a="1")], config, history)

    with ImageStore(store.root) as other:
        record = other.inspect("mine")

    assert record.config == config
    assert record.history == history


def test_digest_of_an_image_that_says_nothing_new_is_as_it_was() -> None:
    """Names of images made before must stay true: the form is fixed in docs/images.md."""
    config = ImageConfig(env=(("A", "1"),))
    before = {key: asdict(config)[key] for key in ("env", "workdir", "user", "cmd")}
    before |= {"entrypoint": [], "labels": []}
    canonical = json.dumps(
        {"layers": ["l"], "config": before}, sort_keys=True, separators=(",", ":")
    )

    expected = hashlib.sha256(b"coldframe-image-1\n" + canonical.encode()).hexdigest()
    assert image_digest(["l"], config) == expected
    assert image_digest(["l"], replace(config, stop_signal="9")) != expected


@pytest.mark.parametrize("keyword", ["ENV", "LABEL", "ARG"])
def test_values_that_double_with_each_line_are_refused_early(keyword: str) -> None:
    """Thirty lines of `B=$A$A` would be a gigabyte of the host's memory."""
    config, scope = ImageConfig(), Arguments({}, {})
    with pytest.raises(WordError, match="characters"):
        for line in parse(
            "FROM x\n"
            + "".join(
                f"{keyword} A{number}=${{A{number - 1}-xxxxxxxx}}${{A{number - 1}-xxxxxxxx}}\n"
                for number in range(1, 40)
            ),
            "D",
        )[1:]:
            if keyword == "ARG":
                scope.declare(line, {})
            else:
                config = configure(config, line, dict(config.env + config.labels))


@pytest.mark.parametrize("keyword", ["ENV", "LABEL"])
def test_values_that_are_many_are_refused(keyword: str) -> None:
    """The kernel would refuse every command of such an image."""
    text = "".join(f"{keyword} A{number}={'x' * 60_000}\n" for number in range(18))
    with pytest.raises(WordError, match="1048576 are the most"):
        _configured(text[:1_000_000] + f"\n{keyword} V=$V B={'x' * 60_000} C={'x' * 60_000}")
    with pytest.raises(WordError, match="more than 4096 names"):
        _configured(f"{keyword} " + " ".join(f"A{number}=1" for number in range(5000)))
