"""Reading Dockerfiles: what is taken is taken as Docker does, the rest is refused by line."""

from __future__ import annotations

import pytest

from coldframe.images.dockerfile import decode, parse
from coldframe.protocol.errors import DockerfileError


def _values(text: str) -> list[tuple[str, str]]:
    return [(one.keyword, one.value) for one in parse(text, "Dockerfile")]


def test_parse_joins_continuations_and_drops_comments() -> None:
    """The commonest shape of a RUN line in the wild."""
    text = (
        "# a comment\n\nfrom debian:bookworm\r\n"
        "RUN apt-get update && \\\n"
        "    # why\n"
        "\n"
        "    apt-get install -y git \\  \n"
        "      curl\n"
        "  ENV A=1\n"
    )

    assert _values(text) == [
        ("FROM", "debian:bookworm"),
        ("RUN", "apt-get update &&     apt-get install -y git       curl"),
        ("ENV", "A=1"),
    ]


def test_parse_names_the_first_line_of_an_instruction() -> None:
    """An error at line 40 of a file must say 40."""
    instructions = parse("FROM x\n\n# c\nRUN a \\\n  b\nRUN c", "dir/Dockerfile")

    assert [one.where for one in instructions] == [
        "dir/Dockerfile:1",
        "dir/Dockerfile:4",
        "dir/Dockerfile:6",
    ]


def test_parse_reads_exec_form_only_when_it_is_json() -> None:
    """Docker takes anything else as a command line, single quotes included."""
    taken = parse('FROM x\nRUN ["a", "b c"]\nRUN [\'a\']\nRUN [ -f x ] && y\nCOPY ["a b","c"]', "D")

    assert [one.words for one in taken[1:]] == [("a", "b c"), None, None, ("a b", "c")]


def test_parse_reads_flags() -> None:
    """They stand before the arguments only."""
    copy = parse("FROM x\nCOPY --chown=1:2 --chmod=755 a --b /c/", "D")[1]

    assert (copy.flags, copy.value) == ({"chown": "1:2", "chmod": "755"}, "a --b /c/")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('FROM x\nENTRYPOINT ["a"]', "D:2: ENTRYPOINT is not supported yet"),
        ("FROM x\n\ncmd a", "D:3: CMD is not supported yet"),
        ("FROM x\nADD a b", "D:2: ADD is not supported yet"),
        ("ARG A\nFROM x", "D:1: ARG is not supported yet"),
        ("RUN a", "D:1: RUN comes before FROM"),
        ("FROM x\nFROM y", "D:2: a second FROM"),
        ("FROM x\nCOPY --from=y a b", "D:2: COPY --from is not supported yet"),
        ("FROM --platform=linux/arm64 x", "D:1: FROM --platform is not supported yet"),
        ("FROM x\nRUN --mount=type=cache,target=/x a", "D:2: RUN --mount is not supported yet"),
        ("FROM x\nRUN --network=host a", "D:2: RUN --network=host is not supported yet"),
        ("FROM x\nCOPY --chown= a b", "D:2: COPY --chown needs one value"),
        ("FROM x\nRUN cat <<EOF\na\nEOF", "D:2: here-documents (<<EOF) are not supported yet"),
        ('FROM x\nCOPY <<-"E" /a\nx\nE', "D:2: here-documents"),
        ("FROM x\nRUN", "D:2: RUN needs an argument"),
        ("# escape=`\nFROM x", "D:1: escape=` is not supported yet"),
        ("# syntax=other/thing:1\nFROM x", "D:1: syntax=other/thing:1 is not supported yet"),
        ("", "D:1: the file holds no instruction"),
        ("# only this", "D:1: the file holds no instruction"),
        ("FROM x\nfoo", "D:2: FOO is not supported yet"),
    ],
)
def test_parse_of_what_is_not_supported_says_file_and_line(text: str, said: str) -> None:
    """Passing over a line makes another image than its author meant."""
    with pytest.raises(DockerfileError) as caught:
        parse(text, "D")
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    "text",
    [
        "# escape=\\\nFROM x",
        "# syntax=docker/dockerfile:1.7\n# check=skip=all\nFROM x",
        "#comment\n# escape=`\nFROM x",
        "FROM x\n# escape=`\n",
        "FROM x\nRUN --network=none a",
        "FROM x\nRUN cat <<< word; echo $((1 << 4)) 2>&1",
    ],
)
def test_parse_takes_what_changes_nothing(text: str) -> None:
    """A directive counts at the very top only; a shift is no here-document."""
    assert parse(text, "D")[0].value == "x"


def test_decode_of_other_bytes_says_the_line() -> None:
    """The file may be anything at all."""
    assert decode(b"\xef\xbb\xbfFROM x", "D") == "FROM x"
    with pytest.raises(DockerfileError, match="D:3: the file is not UTF-8"):
        decode(b"FROM x\nRUN a\nRUN \xff\n", "D")
    with pytest.raises(DockerfileError, match="too many"):
        decode(b"#" * (2 << 20), "D")
