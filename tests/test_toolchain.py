"""Triton's digest of itself, remembered: what it says inside `known_key` is what it would say."""

from __future__ import annotations

import os
from types import ModuleType, SimpleNamespace

import pytest

from tunegen import installed, toolchain

DIGEST = "0123456789abcdef" * 4
KEY = f"3.6.0{DIGEST}-{DIGEST}"


class Asked:
    """In place of Triton's function, which keeps its answer."""

    def __init__(self):
        self.times, self.answer = 0, KEY

    def __call__(self):
        self.times += 1
        return self.answer

    def cache_info(self):
        return SimpleNamespace(currsize=self.times)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """`ask` is what a new process hears inside; `asked` is Triton's function of that process."""
    root = tmp_path / "triton"
    for folder in toolchain.FOLDERS:
        (root / folder).mkdir(parents=True)
        (root / folder / "code.py").write_text("text")
    monkeypatch.setenv("TUNEGEN_BUILD", str(tmp_path / "build"))
    from triton import runtime

    cache = ModuleType("triton.runtime.cache")
    cache.__file__, cache.__version__ = str(root / "runtime" / "cache.py"), "3.6.0"
    monkeypatch.setattr(runtime, "cache", cache)
    found = SimpleNamespace(root=root, build=tmp_path / "build", cache=cache, asked=None)

    def ask():
        toolchain._original.cache_clear()
        found.asked = cache.triton_key = Asked()
        with toolchain.known_key():
            heard = cache.triton_key()
        assert cache.triton_key is found.asked
        return heard

    found.ask = ask
    yield found
    toolchain._original.cache_clear()


def test_it_is_asked_once(place):
    assert place.ask() == KEY
    assert place.asked.times == 2, "once inside, once to remember it; the real one computes once"
    for _ in range(2):
        assert place.ask() == KEY
        assert place.asked.times == 0


@pytest.mark.parametrize("folder", toolchain.FOLDERS)
@pytest.mark.parametrize("event", ["edit", "add", "remove", "same size and time"])
def test_it_is_asked_again_once_a_file_has_changed(place, folder, event):
    place.ask()
    path = place.root / folder / "code.py"
    status = path.stat()
    if event == "edit":
        path.write_text("other text")
    elif event == "add":
        path.with_name("more.py").touch()
    elif event == "remove":
        path.unlink()
    else:
        path.write_text("textual"[:4].upper())
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    place.ask()
    assert place.asked.times > 0


def test_it_is_asked_again_of_another_release(place):
    place.ask()
    place.cache.__version__ = "3.6.1"
    place.ask()
    assert place.asked.times > 0


@pytest.mark.parametrize("content", [b"", b"\xff", b"x\ny", KEY.encode(), b"[" * 1000])
def test_a_broken_file_is_written_anew(place, content):
    place.ask()
    (path,) = place.build.iterdir()
    sound = path.read_bytes()
    for spoiled in (content, sound[:-1], sound.replace(b"-", b"+"), sound + b"\n"):
        path.write_bytes(spoiled)
        assert place.ask() == KEY
        assert place.asked.times > 0
        assert path.read_bytes() == sound


def test_a_file_that_others_may_write_is_not_read(place):
    place.ask()
    (path,) = place.build.iterdir()
    path.chmod(0o666)
    place.ask()
    assert place.asked.times > 0
    place.build.chmod(0o777)
    place.ask()
    assert place.asked.times > 0


def test_nothing_is_remembered_that_changed_meanwhile(place):
    toolchain._original.cache_clear()
    place.cache.triton_key = Asked()
    with toolchain.known_key():
        place.cache.triton_key()
        (place.root / "_C" / "code.py").write_text("newer")
    assert not place.build.exists()


def test_triton_gets_its_function_back_whatever_happens(place):
    place.ask()
    toolchain._original.cache_clear()
    place.cache.triton_key = own = Asked()
    heard = []

    def fails():
        with toolchain.known_key():
            heard.append(place.cache.triton_key)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert heard != [own]
    assert place.cache.triton_key is own


def test_nothing_is_done_where_triton_has_no_such_function(place):
    toolchain._original.cache_clear()
    place.cache.triton_key = plain = lambda: "key"
    with toolchain.known_key():
        assert place.cache.triton_key is plain
    assert not place.build.exists()


def test_nothing_is_remembered_of_a_failed_compilation_that_did_not_ask(place):
    toolchain._original.cache_clear()
    place.cache.triton_key = Asked()
    with pytest.raises(KeyError), toolchain.known_key():
        raise KeyError
    assert not place.build.exists()


def test_the_state_of_files_is_told_without_reading_them(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("x")
    (tmp_path / "__pycache__").mkdir()
    before = installed.state_of(tmp_path)
    (tmp_path / "__pycache__" / "a.pyc").write_text("x")
    (tmp_path / "a").chmod(0)
    monkeypatch.setattr("builtins.open", None)
    assert len(before) == 64
    assert installed.state_of(tmp_path) != before, "the time of change"
    assert installed.state_of(tmp_path) == installed.state_of(tmp_path)
