"""User code on the client: which files belong to an archive, and packing them.

Imports `everstep.errors` only. The client, the CLI and the service import it.
"""

from __future__ import annotations

import copy
import gzip
import hashlib
import io
import logging
import os
import re
import shlex
import stat
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from everstep.errors import UsageError

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------- rules

# Rules for uploaded code: size limits, file names, and which modules can be imported by which
# name.

MAX_ARCHIVE_BYTES = 64 << 20
"""Maximum size of the archive as sent."""
MAX_UNPACKED_BYTES = 256 << 20
"""Maximum size of all files together."""
MAX_FILES = 10_000
MAX_PATH_BYTES = 512
MAX_DEPTH = 32
"""Maximum number of parts in a file's path."""

DIGEST_PATTERN = r"^sha256:[0-9a-f]{64}$"
REQUIREMENT_PATTERN = (
    r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?(\[[A-Za-z0-9._,-]+\])?"
    r"( ?(==|>=|<=|~=|!=|<|>) ?[A-Za-z0-9.*+!]+)?( ?, ?(==|>=|<=|~=|!=|<|>) ?[A-Za-z0-9.*+!]+)*$"
)
"""A package by name, extras and versions."""
ENTRY_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$"

GIT_TAG = "git"
"""Tag of a run that says which commit its code was packed from."""
MODULE_FLAG = "-m "
"""A script that begins with it is a module, run as ``python -m`` does."""
_MODULE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")

OWN_PACKAGES = frozenset({"everstep", "service", "storage", "train_fn"})
_STACK = frozenset(
    [
        *("cloudpickle", "google", "grpc", "numpy", "psutil", "pyarrow", "pydantic"),
        *("pydantic_core", "ray", "torch", "torchvision", "yaml"),
    ]
)
"""Packages that ranks import. User modules come first on the path and would shadow them."""


def import_roots(paths: Collection[str]) -> tuple[str, ...]:
    """Return the directories of an archive that go on the path, in order. The archive's root is
    ``""``, the others end in ``/``.

    Besides the root these are ``src``, unless it is a package, and, if everything is in one
    directory that is not a package (as in archives from GitHub), that directory and its ``src``.

    >>> import_roots(["proj/src/mine/task.py", "proj/README.md"])
    ('', 'proj/', 'proj/src/')
    """
    tops = {path.partition("/")[0] for path in paths}
    bases = [""]
    if len(tops) == 1:
        [top] = tops
        if top not in paths and f"{top}/__init__.py" not in paths:
            bases.append(f"{top}/")
    roots: dict[str, None] = {}
    for base in bases:
        roots[base] = None
        source = f"{base}src/"
        if f"{source}__init__.py" not in paths and any(path.startswith(source) for path in paths):
            roots[source] = None
    return tuple(roots)


def modules(paths: Collection[str]) -> tuple[str, ...]:
    """Return the dotted names of all modules.

    >>> modules(["src/mine/__init__.py", "src/mine/task.py", "train.py", "notes-1.py"])
    ('mine', 'mine.task', 'train')
    """
    roots = import_roots(paths)
    return tuple(sorted({name for path in paths for name in _names(path, roots)}))


def module_path(
    paths: Collection[str], module: str, roots: Collection[str] | None = None
) -> str | None:
    """Return the file that ``import module`` runs; None if the archive has none.

    Args:
        roots: the archive's ``import_roots``, if known.
    """
    for root in import_roots(paths) if roots is None else roots:
        stem = root + module.replace(".", "/")
        for path in (f"{stem}/__init__.py", f"{stem}.py"):
            if path in paths:
                return path
    return None


def script_fault(script: str) -> str | None:
    """Return why ``script`` cannot name a script in an archive, and what to write instead; None if
    it can.

    >>> script_fault("/home/me/train.py")
    'is an absolute path; give its path in the archive, for example train.py'
    """
    if script.startswith(MODULE_FLAG):
        if _MODULE_NAME.fullmatch(script.removeprefix(MODULE_FLAG).strip()):
            return None
        return "is not a module's name after -m; write for example -m pkg.train"
    parts = script.split("/")
    if script.startswith(("/", "~")) or re.match(r"[A-Za-z]:", script):
        return "is an absolute path; give its path in the archive, for example train.py"
    if ".." in parts or "" in parts or "\\" in script or not script.isprintable():
        return "is not a plain path in the archive; write for example pkg/train.py"
    if not script.endswith(".py"):
        return "is not a Python file; give a path that ends in .py, or a module as -m pkg.train"
    return None


def script_path(paths: Collection[str], script: str) -> str | None:
    """Return the file of the archive that a valid ``script`` runs; None if the archive has none.

    >>> script_path(["proj/pkg/train.py", "proj/README.md"], "-m pkg.train")
    'proj/pkg/train.py'
    """
    if not script.startswith(MODULE_FLAG):
        plain = script.removeprefix("./")
        return next((root + plain for root in import_roots(paths) if root + plain in paths), None)
    module = script.removeprefix(MODULE_FLAG).strip()
    found = module_path(paths, module)
    if found is not None and found.endswith("/__init__.py"):
        found = module_path(paths, f"{module}.__main__")
    return found


def collisions(paths: Collection[str]) -> list[str]:
    """Return one message for each module whose name shadows another package, or is shadowed by
    one."""
    found = {}
    for root in import_roots(paths):
        for path in sorted(paths):
            if not path.startswith(root) or not path.endswith((".py", ".so")):
                continue
            first, separator, _ = path.removeprefix(root).partition("/")
            name = first if separator else first.partition(".")[0]
            regular = not separator or f"{root}{first}/__init__.py" in paths
            owner = _owner(name, regular=regular)
            if owner is not None:
                place = f"{root}{first}"
                found[place] = (
                    f"{place}: the name {name!r} is reserved for {owner}; rename it, or list it in "
                    ".everstepignore"
                )
    return list(found.values())


def _owner(name: str, *, regular: bool) -> str | None:
    """Return who owns a module's name. A directory without ``__init__.py`` never shadows the
    standard library."""
    if name in OWN_PACKAGES:
        return "Everstep itself"
    if name in _STACK:
        return "a package that every rank imports"
    if regular and name in sys.stdlib_module_names:
        return "Python's standard library"
    return None


def _names(path: str, roots: Collection[str]) -> Iterator[str]:
    """Yield the names under which a file can be imported. Files in ``src`` only have their names
    below it."""
    sources = [root for root in roots if root.endswith("src/") and path.startswith(root)]
    for root in sources or roots:
        if not path.endswith(".py") or not path.startswith(root):
            continue
        parts = path.removeprefix(root).removesuffix(".py").split("/")
        if parts[-1] == "__init__":
            parts.pop()
        if parts and all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", part) for part in parts):
            yield ".".join(parts)


# ---------------------------------------------------------------- source

# ``everstep submit --code``: user code in place of a spec's task.


def with_code(
    raw: dict[str, Any] | None,
    path: str | None,
    task: str | None = None,
    train_fn: str | None = None,
    script: str | None = None,
    argv: list[str] | None = None,
) -> tuple[dict[str, Any], bytes | None]:
    """Return the spec with its code filled in, and the archive to upload before submitting it.

    Args:
        raw: fields of the spec; None if no file was given, which requires ``path``.
        path: directory or archive with the code; None leaves ``raw`` unchanged.
        task, train_fn: entry point as ``module:name``; by default the spec's.
        script: entry point as a path in the archive, or ``-m module``.
        argv: arguments of the script; None keeps the spec's.

    Raises UsageError.
    """
    given = {"task": task, "train_fn": train_fn, "script": script}
    entry = {field: value for field, value in given.items() if value}
    if path is None:
        if entry or argv:
            raise UsageError(
                "--task, --train-fn and --script select an entry point of --code; add --code "
                "DIRECTORY"
            )
        if raw is None:
            raise UsageError("give a SPEC.yaml, or --code DIRECTORY with --task MODULE:CLASS")
        return raw, None
    data = pack(path)
    spec = copy.copy(raw) if raw else {}
    code = spec.get("code") or {}
    if not isinstance(code, Mapping):
        raise UsageError(f"code: {code!r} is not a mapping; write for example {{script: train.py}}")
    code = dict(code)
    code["archive"] = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if entry:
        code = {key: value for key, value in code.items() if key not in given} | entry
    if argv:
        if not code.get("script"):
            raise UsageError(
                "arguments after -- are those of a script; add --script FILE.py, or remove them"
            )
        code["argv"] = argv
    spec["code"] = code
    name = _name_of_script(script) if script else task or train_fn or Path(path).resolve().name
    spec.setdefault("name", name.rpartition(":")[2])
    return spec, data


def rehearse_command(
    entry: Mapping[str, str | None],
    code: str = "DIRECTORY",
    before: Sequence[str] = (),
    after: Sequence[str] = (),
) -> str:
    """Return the command that rehearses a restart on a user's code.

    Args:
        entry: its entry point, by the name of the option.
        code: the directory that it is in.
        before: what comes before its options: the file of a spec.
        after: what comes after them: settings, and arguments of the script.
    """
    set_ones = [(f"--{name.replace('_', '-')}", value) for name, value in entry.items() if value]
    options = [part for each in set_ones for part in each]
    return shlex.join(("everstep", "rehearse", *before, "--code", code, *options, *after))


def _name_of_script(script: str) -> str:
    """Return a run's name for its script: ``train`` for ``pkg/train.py`` and ``-m pkg.train``."""
    module = script.removeprefix(MODULE_FLAG).strip()
    return Path(module).stem if module == script else module.rpartition(".")[2]


# ---------------------------------------------------------------- pack

# Pack a directory of code into an archive; the same files always give the same bytes.

IGNORE_FILES = (".everstepignore", ".gitignore")
"""In order of precedence: a match in the first overrides the second."""
_NEVER = frozenset(
    [
        *(".git", ".hg", ".svn", "__pycache__", ".ipynb_checkpoints"),
        *(".mypy_cache", ".pytest_cache", ".ruff_cache"),
    ]
)
_SECRETS = re.compile(
    r"\.aws|\.ssh|\.git-credentials|[._]netrc|\.pypirc|id_(rsa|dsa|ecdsa|ed25519)"
    r"|.*\.env|\.env\.(?!(example|sample|template)$).*"
    r"|credentials.*\.json|.*\.(key|pem|p12|pfx)",
    re.IGNORECASE,
)
"""Names of files and directories with passwords and keys."""
_PACKAGE = "__init__.py"
_SUFFIXES = (".zip", ".tar.gz", ".tgz")
_GIT = shlex.split("git -c core.fsmonitor=false -c core.hooksPath=/dev/null")


def pack(path: str | os.PathLike[str]) -> bytes:
    """Return the archive of a directory, of one ``.py`` file, or of an existing archive.

    Raises UsageError if the path does not exist, contains no module, is too large, contains a link
    that points outside, or a module with a reserved name.
    """
    source, largest = Path(path).expanduser(), ""
    try:
        if source.is_file() and source.name.endswith(_SUFFIXES):
            data = source.read_bytes()
        else:
            files = {source.name: source} if source.is_file() else _files_of(source)
            _check(source, files)
            data = _archive(files)
            largest = f"; {_largest(files)}"
    except OSError as exc:
        raise UsageError(f"{exc.filename or source} cannot be read: {exc.strerror or exc}") from exc
    if len(data) > MAX_ARCHIVE_BYTES:
        raise UsageError(
            f"the archive of {source} is larger than {MAX_ARCHIVE_BYTES >> 20} MiB; list data in "
            f".everstepignore{largest}"
        )
    return data


def is_secret(path: str) -> bool:
    """Return whether the name of a file in an archive, or of a directory that it lies in, says that
    it holds passwords or keys."""
    return any(_SECRETS.fullmatch(name) for name in path.split("/"))


def _files_of(source: Path) -> dict[str, Path]:
    """Return files by their path in the archive."""
    if not source.is_dir():
        raise UsageError(f"{source} does not exist; give the directory that contains your package")
    ignored = _Ignored(source)
    files = {str(file.relative_to(source)): file for file in _walk(source, source, ignored)}
    if secrets := [str(path.relative_to(source)) for path in ignored.secrets]:
        logger.warning(
            "left out of the code, since they look like secrets: %s. `!NAME` in .everstepignore "
            "takes one in",
            ", ".join(secrets),
        )
    return files


def _walk(source: Path, directory: Path, ignored: _Ignored) -> Iterator[Path]:
    ignored.read(directory)
    for path in sorted(directory.iterdir()):
        is_dir = path.is_dir() and not path.is_symlink()
        if path.name in _NEVER or path.suffix == ".pyc":
            continue
        is_ignored = ignored.says(path, is_dir=is_dir)
        if is_ignored is None and _SECRETS.fullmatch(path.name):
            ignored.secrets.append(path)
            continue
        if is_ignored:
            continue
        if is_dir:
            if not (path / "pyvenv.cfg").exists():  # a virtual environment
                yield from _walk(source, path, ignored)
        elif path.is_symlink() and not (
            path.is_file() and path.resolve().is_relative_to(source.resolve())
        ):
            raise UsageError(
                f"{path} is a link to a directory, or points outside {source}; list it in "
                ".everstepignore, or copy the files there"
            )
        elif stat.S_ISREG(path.stat().st_mode):
            yield path


def _installed_in(directory: Path) -> set[str]:
    """Return the directories in this one that ``pip install --target`` has put there."""
    found: set[str] = set()
    for record in directory.glob("*.dist-info/RECORD"):
        paths = (line.partition(",")[0] for line in record.read_text(errors="replace").splitlines())
        found |= {path.partition("/")[0] for path in paths if "/" in path}
    return found - {"..", ""}


class _Ignored:
    """The ignore files of a directory, of those below it, and of the repository around it.

    A ``.gitignore`` says what its author keeps out of git, not what the code needs. So that of an
    installed package does not count, nor one that leaves out the ``__init__.py`` beside it.
    """

    def __init__(self, source: Path) -> None:
        self.secrets: list[Path] = []
        """What was left out since it looks like a secret."""
        self._installed: set[Path] = set()
        self._specs: dict[tuple[str, Path], object] = {}
        above = source.resolve()
        repository = next(
            (parent for parent in (above, *above.parents) if (parent / ".git").exists()), above
        )
        self._source, self._resolved = source, above
        for parent in above.parents:
            if parent.is_relative_to(repository):
                self.read(parent)

    def read(self, directory: Path) -> None:
        """Add the ignore files of a directory."""
        from pathspec import GitIgnoreSpec

        self._installed |= {directory / name for name in _installed_in(directory)}
        is_installed = any(parent in self._installed for parent in (directory, *directory.parents))
        for name in IGNORE_FILES:
            file = directory / name
            if not file.is_file() or (is_installed and name == ".gitignore"):
                continue
            spec = GitIgnoreSpec.from_lines(file.read_text(errors="replace").splitlines())
            hides_package = (directory / _PACKAGE).is_file() and spec.match_file(_PACKAGE)
            if name != ".gitignore" or not hides_package:
                self._specs[name, self._absolute(directory)] = spec

    def says(self, path: Path, *, is_dir: bool) -> bool | None:
        """Return whether a path is ignored; None if no file names it. As in git, the innermost file
        that matches it decides."""
        absolute = self._absolute(path)
        for name in IGNORE_FILES:
            for parent in absolute.parents:
                spec = self._specs.get((name, parent))
                if spec is None:
                    continue
                found = spec.check_file(str(absolute.relative_to(parent)) + ("/" if is_dir else ""))  # type: ignore[attr-defined]
                if found.include is not None:
                    return bool(found.include)
        return None

    def _absolute(self, path: Path) -> Path:
        """Return the path below the resolved source, without resolving links on the way."""
        return (
            self._resolved / path.relative_to(self._source)
            if path.is_relative_to(self._source)
            else path
        )


def _check(source: Path, files: dict[str, Path]) -> None:
    """Refuse what the service would refuse, with the names that the user knows."""
    total_bytes = sum(file.stat().st_size for file in files.values())
    if total_bytes > MAX_UNPACKED_BYTES or len(files) > MAX_FILES:
        named = _largest(files) if len(files) <= MAX_FILES else _fullest(files)
        raise UsageError(
            f"{source} has {len(files)} files, {total_bytes >> 20} MiB; the limit is {MAX_FILES} "
            f"files and {MAX_UNPACKED_BYTES >> 20} MiB. List data in .everstepignore; {named}"
        )
    problems = collisions(files.keys())
    if problems:
        raise UsageError("; ".join(problems))
    if not any(name.endswith(".py") for name in files):
        raise UsageError(
            f"{source} contains no Python module; give the directory that contains your package"
        )


def _largest(files: Mapping[str, Path]) -> str:
    """Return the largest files, in words."""
    sizes = sorted(((file.stat().st_size, name) for name, file in files.items()), reverse=True)
    named = ", ".join(f"{name} ({size / (1 << 20):.1f} MiB)" for size, name in sizes[:3])
    return f"the largest files are {named}"


def _fullest(files: Mapping[str, Path]) -> str:
    """Return the folders with the most files, in words."""
    folders = Counter(name.rpartition("/")[0] or "." for name in files)
    named = ", ".join(f"{name} ({count})" for name, count in folders.most_common(3))
    return f"the folders with the most files are {named}"


def git_state(path: str | os.PathLike[str], archive: bytes) -> str | None:
    """Return the commit and branch that code was packed from, and whether the archive has anything
    that is not in the commit. Return None outside of a git repository, and for an archive that was
    given as such: nothing says what it was made from."""
    source = Path(path).expanduser()
    if source.is_file() and source.name.endswith(_SUFFIXES):
        return None
    folder = (source if source.is_dir() else source.parent).resolve()
    # those of a hook name another repository
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env["GIT_OPTIONAL_LOCKS"] = "0"

    def git(*words: str | Path) -> bytes:
        command = [*_GIT, "-C", str(folder), *words]
        return subprocess.run(command, env=env, capture_output=True, timeout=5, check=True).stdout

    try:
        status = git("status", "--porcelain=v2", "-b", "--ignore-submodules=none", source.resolve())
        tracked = git("ls-files", "-z", "--recurse-submodules")
    except (OSError, subprocess.SubprocessError):
        return None
    lines = status.decode(errors="replace").removesuffix("\n").split("\n")
    about = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# "))
    commit, branch = about["branch.oid"], about["branch.head"]
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        packed = {folder / name for name in tar.getnames()}
    packed |= {file.resolve() for file in packed}
    in_git = {folder / os.fsdecode(name) for name in tracked.split(b"\0")}
    changes = ", with changes" if len(lines) > len(about) or not packed <= in_git else ""
    on = "" if branch == "(detached)" else f" on {branch}"
    return None if commit == "(initial)" else f"{commit[:12]}{on}{changes}"[:256]


def _archive(files: dict[str, Path]) -> bytes:
    """Return a tar.gz that depends only on names, contents and the executable bit."""
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=buffer, compresslevel=6, mtime=0) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name, file in sorted(files.items()):
            content = file.read_bytes()
            info = tarfile.TarInfo(name)
            info.size = len(content)
            info.mode = 0o755 if file.stat().st_mode & stat.S_IXUSR else 0o644
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()
