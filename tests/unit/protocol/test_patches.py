"""A patch is the agent's work: it lands exactly as written, or not at all."""

from __future__ import annotations

import difflib
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldframe.protocol.errors import PatchError
from coldframe.protocol.patches import apply, parse

OLD = b"one\ntwo\nthree\nfour\n"
SIMPLE = b"""--- a/x.txt
+++ b/x.txt
@@ -1,3 +1,3 @@
 one
-two
+TWO
 three
"""


def one(patch: bytes, old: bytes = OLD, strip: int = 1) -> bytes:
    changes = parse(patch, strip)
    assert len(changes) == 1
    return apply(old, changes[0])


def test_parse_plain_diff_names_file_and_applies() -> None:
    """The everyday case, without git's headers and with prose around it."""
    change = parse(b"Here is the fix:\n\n" + SIMPLE + b"\nDone.\n", 1)[0]

    assert (change.old_path, change.new_path, change.mode) == ("x.txt", "x.txt", None)
    assert apply(OLD, change) == b"one\nTWO\nthree\nfour\n"


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"a", b"b"), (b"a\n", b"a"), (b"a", b"a\n"), (b"", b"a"), (b"a\nb", b"a\nB\n")],
)
def test_apply_missing_newline_marker_is_honoured(old: bytes, new: bytes, tmp_path: Path) -> None:
    """A lost or added newline changes the file's digest, and some tests."""
    (tmp_path / "old").write_bytes(old)
    (tmp_path / "new").write_bytes(new)
    diff = subprocess.run(
        ["git", "diff", "--no-index", "--no-color", "old", "new"],
        cwd=tmp_path, capture_output=True, check=False,
    ).stdout  # fmt: skip
    diff = diff.replace(b"a/old", b"a/f").replace(b"b/new", b"b/f")

    assert one(diff, old) == new


@given(
    st.lists(st.sampled_from([b"a\n", b"b\n", b"c\r\n", b"\n", b"\xff\x00\n"]), max_size=12),
    st.lists(st.sampled_from([b"a\n", b"b\n", b"c\r\n", b"\n", b"\xff\x00\n"]), max_size=12),
)
def test_apply_any_diff_gives_the_new_file(old: list[bytes], new: list[bytes]) -> None:
    """Whatever a diff tool writes must come out as what it was made from."""
    diff = b"".join(
        difflib.diff_bytes(difflib.unified_diff, old, new, b"a/f", b"b/f", n=1, lineterm=b"\n")
    )
    if old == new:
        return

    assert one(diff, b"".join(old)) == b"".join(new)


def test_parse_git_headers_give_new_deleted_renamed_copied_and_modes() -> None:
    """Agents' patches come from git; each of its kinds must do what it says."""
    patch = b"""diff --git a/new.sh b/new.sh
new file mode 100755
index 0000000..e69de29
--- /dev/null
+++ b/new.sh
@@ -0,0 +1 @@
+#!/bin/sh
diff --git a/gone b/gone
deleted file mode 100644
index e69de29..0000000
--- a/gone
+++ /dev/null
@@ -1 +0,0 @@
-x
diff --git a/from b/to
similarity index 100%
rename from from
rename to to
diff --git a/orig b/dup
similarity index 90%
copy from orig
copy to dup
--- a/orig
+++ b/dup
@@ -1 +1 @@
-x
+y
diff --git a/tool b/tool
old mode 100644
new mode 100755
diff --git a/empty b/empty
new file mode 100644
index 0000000..e69de29
"""
    changes = parse(patch, 1)

    assert [(c.old_path, c.new_path, c.mode, c.copy) for c in changes] == [
        (None, "new.sh", 0o755, False),
        ("gone", None, None, False),
        ("from", "to", None, False),
        ("orig", "dup", None, True),
        ("tool", "tool", 0o755, False),
        (None, "empty", 0o644, False),
    ]


def test_parse_quoted_name_is_unescaped() -> None:
    """git quotes names that are not plain; a wrong name would patch another file."""
    patch = SIMPLE.replace(b"a/x.txt", b'"a/\\303\\251 \\"q\\".txt"').replace(
        b"b/x.txt", b'"b/\\303\\251 \\"q\\".txt"'
    )
    assert parse(patch, 1)[0].new_path == 'é "q".txt'


def test_parse_name_with_blanks_and_time_ends_at_the_tab() -> None:
    """diff writes the time after a tab; it is not part of the name."""
    patch = SIMPLE.replace(b"x.txt\n", b"my file.txt\t2024-01-01 00:00:00\n")
    assert parse(patch, 1)[0].new_path == "my file.txt"


def test_parse_strip_counts_leading_parts() -> None:
    """Harnesses write patches with and without prefixes."""
    assert parse(SIMPLE.replace(b"a/x", b"x").replace(b"b/x", b"x"), 0)[0].path == "x.txt"
    assert parse(SIMPLE.replace(b"/x", b"/deep/x"), 2)[0].path == "x.txt"


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        (b"no diff here\n", "no change"),
        (SIMPLE.replace(b"x.txt", b"../x.txt"), "outside"),
        (SIMPLE[: -len(b" three\n")], "ends early"),
        (SIMPLE.replace(b" three", b"?three"), "not a line of a hunk"),
        (SIMPLE + SIMPLE, "twice"),
        (b"diff --git a/x b/x\nGIT binary patch\nliteral 0\n", "binary"),
        (b"diff --git a/x b/x\nnew file mode 120000\n--- /dev/null\n+++ b/x\n", "symbolic link"),
        (b"diff --git a/x b/x\nnew file mode 160000\n", "submodule"),
        (SIMPLE.replace(b"b/x.txt", b"b/y.txt"), "two names"),
        (b"@@ -1 +1 @@\n-a\n+b\n", "without a file"),
    ],
)
def test_parse_bad_patch_is_refused_with_the_reason(patch: bytes, says: str) -> None:
    """What is not understood must not be half applied."""
    with pytest.raises(PatchError, match=says):
        parse(patch, 1)


def test_apply_shifted_hunk_is_refused_and_says_where_it_would_fit() -> None:
    """Fuzz lands edits in the wrong function without a word; the caller can decide."""
    with pytest.raises(PatchError, match=r"hunk 1 .*line 1: expected b'one\\n'.*at line 2"):
        one(SIMPLE, b"zero\n" + OLD)


def test_apply_context_beyond_the_end_is_refused() -> None:
    """A patch for a longer file is for another file."""
    with pytest.raises(PatchError, match="the file ends"):
        one(SIMPLE, b"one\ntwo\n")


def test_apply_overlapping_hunks_are_refused() -> None:
    """Two hunks over one place have no meaning."""
    hunk = SIMPLE[SIMPLE.index(b"@@") :]
    with pytest.raises(PatchError, match="overlaps"):
        one(SIMPLE + hunk)


def test_apply_deletion_of_other_content_is_refused() -> None:
    """Deleting a file that has more in it than the patch knows would lose work."""
    patch = b"--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-one\n"
    with pytest.raises(PatchError, match="does not"):
        one(patch, OLD)


def test_hunk_that_does_not_fit_a_large_file_is_refused_soon() -> None:
    """Looking where else it would fit must not take the square of what is sent."""
    half = 100_000
    old = b"x\n" * half + b"y\n"
    hunk = b"@@ -1,%d +0,0 @@\n" % half + b"-x\n" * (half - 1) + b"-z\n"
    (change,) = parse(b"--- a/f\n+++ b/f\n" + hunk, 1)
    began = time.process_time()
    with pytest.raises(PatchError, match=f"line {half}: expected"):
        apply(old * 2, change)
    assert time.process_time() - began < 5.0
