"""Reading Dockerfiles: what is taken is taken as Docker does, the rest is refused by line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
        ("RUN a", "D:1: RUN comes before FROM; only ARG may"),
        ("ARG A=1\nENV B=2\nFROM x", "D:2: ENV comes before FROM"),
        ("ARG A", "D:1: the file has no FROM"),
        ("FROM x\nCOPY --parents=maybe a b", "D:2: COPY --parents is true or false"),
        ("FROM x\nADD --checksum=sha256:1 a b", "D:2: ADD --checksum is not supported; remove it"),
        ("FROM x\nADD --checksum=sha256:1 a b", "D:2: ADD --checksum is not supported"),
        ("FROM x\nRUN --security=insecure a", "D:2: RUN --security is not supported"),
        ("FROM x\nCOPY --chown= a b", "D:2: COPY --chown needs one value"),
        ("FROM x\nCOPY --from=a --from=b a b", "D:2: COPY --from needs one value"),
        ("FROM x\nRUN cat <<EOF\na\n EOF", "D:2: the here-document 'EOF' has no end"),
        ("FROM x\nRUN", "D:2: RUN needs an argument"),
        ("# escape=x\nFROM x", "D:1: escape=x is not possible"),
        ("# escape=`\n# escape=`\nFROM x", "D:2: a second escape directive"),
        ("# syntax=other/thing:1\nFROM x", "D:1: syntax=other/thing:1 is another language"),
        ("", "D:1: the file holds no instruction"),
        ("# only this", "D:1: the file holds no instruction"),
        ("FROM x\nfoo", "D:2: 'FOO' is no instruction; there are: ADD, ARG"),
    ],
)
def test_parse_of_what_is_not_supported_says_file_and_line(text: str, said: str) -> None:
    """Passing over a line makes another image than its author meant."""
    with pytest.raises(DockerfileError) as caught:
        parse(text, "D")
    assert str(caught.value).startswith(said)


def test_parse_with_another_escape_keeps_backslashes() -> None:
    """Paths with backslashes are why the directive is there."""
    taken = parse("# escape=`\nFROM x\nRUN a `\n  b\nRUN c \\\nRUN d", "D")

    assert [one.value for one in taken[1:]] == ["a   b", "c \\", "d"]
    assert {one.escape for one in taken} == {"`"}


def test_parse_of_doubled_escape_at_the_end_is_no_continuation() -> None:
    """The first one escapes the second."""
    assert _values("FROM x\nRUN a \\\\\nRUN b")[1:] == [("RUN", "a \\\\"), ("RUN", "b")]


HEREDOCS = """FROM x
RUN cat <<A - <<-"B C" > /it
# kept, \\
\tone
A
\ttwo
\tB C
COPY <<EOF /file
$X
EOF
ONBUILD RUN <<E
a
E
RUN echo '<<E' <<< E $((1 << 4))
"""


def test_parse_takes_here_documents_as_they_are() -> None:
    """Comments, blanks and continuations are content there; several may stand on one line."""
    run, copy, trigger, none = parse(HEREDOCS, "D")[1:]

    assert [(one.name, one.text, one.expands) for one in run.heredocs] == [
        ("A", "# kept, \\\n\tone\n", True),
        ("B C", "\ttwo\n", False),
    ]
    assert run.heredocs[1].content == "two\n"
    assert [(one.name, one.text) for one in copy.heredocs] == [("EOF", "$X\n")]
    assert [one.text for one in trigger.heredocs] == ["a\n"]
    assert (none.where, none.heredocs) == ("D:14", ())


def test_parse_takes_mounts_several_times() -> None:
    """The one flag that may be repeated; quotes hold blanks together."""
    run = parse('FROM x\nRUN --mount=type=cache,target=/a --mount="target=/b c" make', "D")[1]

    assert run.mounts == ("type=cache,target=/a", '"target=/b c"')
    assert run.text == 'RUN --mount=type=cache,target=/a --mount="target=/b c" make'


@given(st.text(alphabet="FROMUNCPYAD x\n\\`#=<-'\"[]EO${}:\t", max_size=200))
def test_parse_of_any_text_ends_in_instructions_or_a_named_line(text: str) -> None:
    """Dockerfiles come from strangers: no other exception, no endless loop."""
    try:
        instructions = parse("FROM x\n" + text, "D")
    except DockerfileError as error:
        assert str(error).startswith("D:")
    else:
        assert all(one.where.startswith("D:") for one in instructions)


@given(st.lists(st.text(alphabet="abc d\t$\\'\"#<", max_size=20), max_size=8))
def test_parse_gives_quoted_here_document_back_unchanged(lines: list[str]) -> None:
    """What stands in one is data: any text but its own end."""
    content = "".join(f"{line}\n" for line in lines)

    copy = parse(f"FROM x\nCOPY <<'END' /f\n{content}END\nUSER 1", "D")

    assert copy[1].heredocs[0].content == content
    assert copy[2].keyword == "USER"


def test_parse_of_deeply_nested_json_is_shell_form() -> None:
    """A recursion error would be no sentence."""
    assert parse("FROM x\nRUN " + "[" * 200_000, "D")[1].words is None


@pytest.mark.parametrize(
    "text",
    [
        "# escape=\\\nFROM x",
        "# syntax=docker/dockerfile:1.7\n# check=skip=all\nFROM x",
        "#comment\n# escape=`\nFROM x",
        "FROM x\n# escape=`\n",
        "FROM x\nRUN --network=none a",
        "FROM x\nRUN cat <<< word; echo $((1 << 4)) 2>&1",
        "# syntax = docker.io/docker/dockerfile-upstream:master\nFROM x",
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
    with pytest.raises(DockerfileError, match="are no Dockerfile"):
        decode(b"#" * (2 << 20), "D")


def test_parse_of_too_many_instructions_is_refused() -> None:
    """Planning looks back at what was before: a hundred thousand lines would take hours."""
    with pytest.raises(DockerfileError, match="D:1001: more than 1000 instructions"):
        parse("FROM x\n" * 100_000, "D")
