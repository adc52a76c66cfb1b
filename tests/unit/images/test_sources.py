"""What COPY reads from: a build context, or an image."""

from __future__ import annotations

from pathlib import Path

import pytest

from coldframe.images.sources import Context, ImageSource, Source


@pytest.mark.parametrize("fault", [FileNotFoundError, NotADirectoryError])
def test_fault_of_who_reads_an_entry_is_told_as_it_is(tmp_path: Path, fault: type[OSError]) -> None:
    """It was taken for a name that is not there, and the copy's own fault was lost."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d/f").touch()
    sources: list[Source] = [Context(tmp_path), ImageSource([tmp_path], "image")]
    for source in sources:
        with pytest.raises(fault, match="the reader's"), source.entry("d/f"):
            raise fault("the reader's")
