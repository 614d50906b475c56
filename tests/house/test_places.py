"""Files of kvcellar are below the user's directories, in any environment: never into the working directory, and
never to the root."""

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from kvcellar.places import NoPlace, cache, state

# The system calls of this process cannot be watched from here, so it reports each directory that it would create.
WATCHED = """
import sys
sys.addaudithook(lambda event, args: event == "os.mkdir" and print(args[0], flush=True))
from kvcellar.kernels.compiled import NotCompiled, library
from pathlib import Path
try:
    library(Path(sys.argv[1]), {"PATH": __import__("os").environ["PATH"], **dict(w.split("=") for w in sys.argv[2:])})
except NotCompiled as error:
    print("refused:", error)
"""


@pytest.fixture
def registered(tmp_path, monkeypatch) -> Path:
    """A home directory in the password database."""
    home = tmp_path / "registered"
    home.mkdir()
    entry = pwd.struct_passwd(("user", "x", os.geteuid(), 0, "", str(home), "sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: entry)
    return home


def test_an_absolute_xdg_directory_counts_before_any_home(tmp_path):
    environment = {"XDG_CACHE_HOME": str(tmp_path / "c"), "XDG_STATE_HOME": str(tmp_path / "s"), "HOME": "nowhere"}
    assert (cache(environment), state(environment)) == (tmp_path / "c/kvcellar", tmp_path / "s/kvcellar")


@pytest.mark.parametrize("named", ["", "relative", "./x", "~"])
def test_an_xdg_directory_that_is_not_absolute_does_not_count(tmp_path, named):
    environment = {"XDG_CACHE_HOME": named, "XDG_STATE_HOME": named, "HOME": str(tmp_path)}
    assert cache(environment) == tmp_path / ".cache/kvcellar"
    assert state(environment) == tmp_path / ".local/state/kvcellar"


@pytest.mark.parametrize("environment", [{}, {"HOME": ""}, {"HOME": "."}, {"HOME": "home"}], ids=str)
def test_without_an_absolute_home_the_password_database_counts(registered, environment):
    assert cache(environment) == registered / ".cache/kvcellar"


def test_a_user_without_any_home_is_refused(monkeypatch):
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(NoPlace, match=r"neither \$HOME nor the password database .* set \$XDG_CACHE_HOME"):
        cache({"HOME": ""})


@pytest.mark.parametrize("root", ["/", "//", "/.", "/../", "/usr/.."])
def test_the_root_directory_is_no_place(root):
    with pytest.raises(NoPlace, match=r"\$HOME is the root directory"):
        cache({"HOME": root})
    with pytest.raises(NoPlace, match=r"\$XDG_STATE_HOME is the root directory"):
        state({"XDG_STATE_HOME": root})


def test_a_home_that_is_not_there_is_refused_and_not_created(tmp_path):
    with pytest.raises(NoPlace, match=r"\$HOME, .*absent, is not a directory"):
        cache({"HOME": str(tmp_path / "absent")})


@pytest.mark.parametrize("home", [[], ["HOME="], ["HOME=home"], ["HOME=/"], ["HOME=/nonexistent"]], ids=str)
def test_no_directory_is_created_in_the_working_directory_or_at_the_root(tmp_path, home):
    """In a process of its own, whose only home is that of the environment: its user is in no database."""
    source = tmp_path / "source.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')
    unregistered = f"import pwd\npwd.getpwuid = lambda uid: (_ for _ in ()).throw(KeyError(uid))\n{WATCHED}"
    ran = subprocess.run(
        [sys.executable, "-c", unregistered, str(source), *home],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.startswith("refused: ")
    assert [path.name for path in tmp_path.iterdir()] == ["source.cpp"]
