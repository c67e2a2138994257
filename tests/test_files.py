"""Writing files whole or not at all."""

import os
import threading
from pathlib import Path

import pytest

from cinetile.files import replace_file


def test_replaces_a_file_when_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "result"
    path.write_text("old")

    def fail(_: object) -> None:
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        replace_file(path, fail)
    assert path.read_text() == "old"
    replace_file(path, lambda file: file.write(b"new"))
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["result"]


def test_follows_links(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    link.symlink_to(real)
    replace_file(link, lambda file: file.write(b"new"))
    assert link.is_symlink()
    assert real.read_text() == "new"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_writes_into_a_pipe_instead_of_replacing_it(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(path.read_bytes()))
    reader.start()
    replace_file(path, lambda file: file.write(b"new"))
    reader.join(timeout=10)
    assert received == [b"new"]
    assert path.is_fifo()
