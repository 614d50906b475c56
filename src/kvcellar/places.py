"""places: the user's directories that kvcellar writes files to, and that of the user's own settings, by the XDG base
directory rules.

`$XDG_CACHE_HOME`, `$XDG_CONFIG_HOME`, `$XDG_DATA_HOME` and `$XDG_STATE_HOME` are used if they are absolute. Otherwise
the directory is below the home directory: `$HOME`, or, if that is empty, unset or relative, the home directory in the
password database.
No path is relative to the working directory, a home directory is never created, and the root directory is never used.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from kvcellar.errors import KvcellarError


class NoPlace(KvcellarError):
    """There is no usable directory of the user. The message has the reason, and the variable to set."""


def cache(environment: Mapping[str, str]) -> Path:
    """Directory for files that can be recreated. Does not create it. Raises `NoPlace`."""
    return _below(environment, "XDG_CACHE_HOME", ".cache")


def state(environment: Mapping[str, str]) -> Path:
    """Directory for files that persist between starts. Does not create it. Raises `NoPlace`."""
    return _below(environment, "XDG_STATE_HOME", ".local/state")


def config(environment: Mapping[str, str]) -> Path:
    """Directory of the user's own settings. Does not create it. Raises `NoPlace`."""
    return _below(environment, "XDG_CONFIG_HOME", ".config")


def models(environment: Mapping[str, str]) -> Path:
    """Directory of the library of models: `$KVCELLAR_MODELS`, else below the directory for data of the user. Does not
    create it. Raises `NoPlace`."""
    named = environment.get("KVCELLAR_MODELS", "")
    if not named:
        return _below(environment, "XDG_DATA_HOME", ".local/share") / "models"
    if not os.path.isabs(named):
        raise NoPlace(f"$KVCELLAR_MODELS is {named!r}; it must be the absolute path of a directory")
    return _no_root(Path(named), "$KVCELLAR_MODELS", "KVCELLAR_MODELS")


def make_private(directory: Path, variable: str = "XDG_CACHE_HOME") -> None:
    """Create `directory` and its parents where they do not exist, for this user only: files in it are executed or
    trusted.

    Raises `OSError`, and `NoPlace` if other users can write into it: the message names `variable`.
    """
    for path in reversed([path for path in (directory, *directory.parents) if not path.exists()]):
        path.mkdir(0o700, exist_ok=True)
    about = directory.stat()
    if about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise NoPlace(f"others can write into {directory}; take that away from them, or set ${variable}")


def _below(environment: Mapping[str, str], variable: str, in_home: str) -> Path:
    named = environment.get(variable, "")
    if os.path.isabs(named):
        return _no_root(Path(named), f"${variable}", variable) / "kvcellar"
    home, name = environment.get("HOME", ""), "$HOME"
    if not os.path.isabs(home):
        home, name = _registered_home(), "the home directory in the password database"
    if not os.path.isabs(home):
        raise NoPlace(f"neither $HOME nor the password database has an absolute home directory; set ${variable}")
    if not os.path.isdir(home):
        raise NoPlace(f"{name}, {home}, is not a directory; set ${variable}")
    return _no_root(Path(home), name, variable) / in_home / "kvcellar"


def _registered_home() -> str:
    import pwd  # not at the top: only POSIX systems have it, and this module is imported on all systems

    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return ""


def _no_root(path: Path, name: str, variable: str) -> Path:
    if os.path.realpath(path) == os.sep:
        raise NoPlace(f"{name} is the root directory, where no directory is created; set ${variable} to another")
    return path
