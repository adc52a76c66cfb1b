"""apply_patch on a sandbox: exact, refusing a stale base, all or nothing."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from coldframe import PatchError, Sandbox, SandboxClient, StaleBaseError
from coldframe.protocol.errors import FileError

PATCH = """--- a/one
+++ b/one
@@ -1,2 +1,2 @@
 1
-2
+two
--- a/two
+++ b/two
@@ -1 +1 @@
-x
+y
"""


def tree(sandbox: Sandbox, path: str = "/repo") -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for entry in sandbox.files.list(path):
        below = f"{path}/{entry.name.decode()}"
        if entry.stat.kind == "directory":
            found |= tree(sandbox, below)
        else:
            found[below] = sandbox.files.read(below)
    return found


@pytest.fixture
def repo(sandbox: Sandbox) -> Sandbox:
    sandbox.files.write("/repo/one", b"1\n2\n")
    sandbox.files.write("/repo/two", b"x\n", mode=0o755)
    return sandbox


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_patch_with_right_base_is_applied_and_reported(repo: Sandbox) -> None:
    """The everyday edit; modes and owners stay, digests are the base of the next patch."""
    base = {"one": sha256(b"1\n2\n"), "two": sha256(b"x\n")}
    done = repo.apply_patch(PATCH, base, root="/repo")

    assert tree(repo) == {"/repo/one": b"1\ntwo\n", "/repo/two": b"y\n"}
    assert (done.written, done.removed) == (("one", "two"), ())
    assert done.sha256 == {"one": sha256(b"1\ntwo\n"), "two": sha256(b"y\n")}
    assert repo.files.stat("/repo/two").mode == 0o755


def test_patch_on_stale_base_changes_nothing(repo: Sandbox) -> None:
    """The file changed since the model saw it: its edit is about something else."""
    before = tree(repo)
    with pytest.raises(StaleBaseError, match="two"):
        repo.apply_patch(PATCH, {"two": sha256(b"other")}, root="/repo")
    with pytest.raises(StaleBaseError, match="missing"):
        repo.apply_patch(PATCH, {"three": sha256(b"")}, root="/repo")
    assert tree(repo) == before


def test_patch_whose_second_file_does_not_fit_changes_nothing(repo: Sandbox) -> None:
    """Half a refactoring is worse than none."""
    repo.files.write("/repo/two", b"other\n")
    before = tree(repo)
    with pytest.raises(PatchError, match="two: hunk 1"):
        repo.apply_patch(PATCH, root="/repo")
    assert tree(repo) == before


def test_patch_that_fails_while_written_is_rolled_back(repo: Sandbox) -> None:
    """A failure between two renames must not show."""
    repo.files.mkdir("/repo/file-not-dir")
    repo.files.write("/repo/blocker", b"a file")
    before = tree(repo)
    patch = PATCH + (
        "diff --git a/new/deep/f b/new/deep/f\nnew file mode 100644\n--- /dev/null\n"
        "+++ b/new/deep/f\n@@ -0,0 +1 @@\n+n\n"
        "diff --git a/blocker/f b/blocker/f\nnew file mode 100644\n--- /dev/null\n"
        "+++ b/blocker/f\n@@ -0,0 +1 @@\n+n\n"
    )
    with pytest.raises(FileError):
        repo.apply_patch(patch, root="/repo")
    assert tree(repo) == before
    assert not repo.files.exists("/repo/new")


def test_patch_through_a_link_is_refused(repo: Sandbox) -> None:
    """A link may point at what the caller never meant to change."""
    repo.exec("cd repo && mv one real && ln -s real one")
    with pytest.raises(PatchError, match="link"):
        repo.apply_patch(PATCH, root="/repo")


def test_patch_of_every_git_kind_gives_gits_own_result(repo: Sandbox, tmp_path: Path) -> None:
    """The reference is git itself: new, deleted, renamed, moved deep, modes, no newline."""

    def git(*arguments: str) -> bytes:
        command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True).stdout

    old = {"keep": b"k\n" * 30, "gone": b"g\n", "from": b"f\n" * 9, "tool": b"t", "e": b""}
    new = {
        "keep": b"k\n" * 15 + b"mid\n" + b"k\n" * 15, "deep/er/to": b"f\n" * 8 + b"last",
        "tool": b"t", "fresh file": b"\xff\x00\n", "e": b"now\n",
    }  # fmt: skip
    git("init", "-q")
    for name, content in old.items():
        (tmp_path / name).write_bytes(content)
        repo.files.write(f"/src/{name}", content)
    git("add", "-A")
    git("commit", "-qm", "old")
    for name in old:
        (tmp_path / name).unlink()
    for name, content in new.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "tool").chmod(0o755)
    git("add", "-A")
    patch = git("diff", "--cached", "--text", "-M", "HEAD")

    done = repo.apply_patch(patch, root="/src")

    assert tree(repo, "/src") == {f"/src/{name}": content for name, content in new.items()}
    assert repo.files.stat("/src/tool").mode & 0o111 == 0o111
    assert set(done.removed) == {"gone", "from"}


def test_patch_of_a_file_that_is_not_there_names_the_root(repo: Sandbox) -> None:
    """A wrong root is the usual reason."""
    missing = "--- a/no.py\n+++ b/no.py\n@@ -1 +1 @@\n-a\n+b\n"

    with pytest.raises(PatchError, match=r"^no\.py: no such file below /etc$"):
        repo.apply_patch(missing, root="/etc")


def test_patch_default_root_is_the_workdir(client: SandboxClient) -> None:
    """The paths of a model's patch are relative to where its commands run."""
    with client.create_sandbox("x", workdir="/app") as sandbox:
        sandbox.files.write("/app/one", b"1\n2\n")
        sandbox.files.write("/app/two", b"x\n")
        sandbox.apply_patch(PATCH)
        assert sandbox.files.read("/app/two") == b"y\n"
