"""Pack a directory of code into an archive; the same files always give the same bytes."""

from __future__ import annotations

import gzip
import io
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

from everstep.code.rules import (
    MAX_ARCHIVE_BYTES,
    MAX_FILES,
    MAX_UNPACKED_BYTES,
    collisions,
)
from everstep.errors import UsageError

IGNORE_FILES = (".everstepignore", ".gitignore")
"""In order of precedence: a match in the first overrides the second."""
_NEVER = frozenset(
    {
        ".git",
        ".hg",
        ".svn",
        "__pycache__",
        ".mypy_cache",
        ".pytest_cache",
        ".ruff_cache",
        ".ipynb_checkpoints",
    }
)
_PACKAGE = "__init__.py"
_SUFFIXES = (".zip", ".tar.gz", ".tgz")


def pack(path: str | os.PathLike[str]) -> bytes:
    """Return the archive of a directory, of one ``.py`` file, or of an existing archive.

    Raises UsageError if the path does not exist, contains no module, is too large, contains a link
    that points outside, or a module with a reserved name.
    """
    source = Path(path).expanduser()
    try:
        if source.is_file() and source.name.endswith(_SUFFIXES):
            data = source.read_bytes()
        else:
            files = {source.name: source} if source.is_file() else _files_of(source)
            _check(source, files)
            data = _archive(files)
    except OSError as exc:
        raise UsageError(f"{exc.filename or source} cannot be read: {exc.strerror or exc}") from exc
    if len(data) > MAX_ARCHIVE_BYTES:
        raise UsageError(
            f"the archive of {source} is larger than {MAX_ARCHIVE_BYTES >> 20} MiB; list data in "
            ".everstepignore"
        )
    return data


def _files_of(source: Path) -> dict[str, Path]:
    """Return files by their path in the archive."""
    if not source.is_dir():
        raise UsageError(f"{source} does not exist; give the directory that contains your package")
    return {str(file.relative_to(source)): file for file in _walk(source, source, _Ignored(source))}


def _walk(source: Path, directory: Path, ignored: _Ignored) -> Iterator[Path]:
    ignored.read(directory)
    for path in sorted(directory.iterdir()):
        is_dir = path.is_dir() and not path.is_symlink()
        if path.name in _NEVER or path.suffix == ".pyc" or ignored.leaves_out(path, is_dir=is_dir):
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

    def leaves_out(self, path: Path, *, is_dir: bool) -> bool:
        """Return whether a path is ignored. As in git, the innermost file that matches it
        decides."""
        absolute = self._absolute(path)
        for name in IGNORE_FILES:
            for parent in absolute.parents:
                spec = self._specs.get((name, parent))
                if spec is None:
                    continue
                found = spec.check_file(str(absolute.relative_to(parent)) + ("/" if is_dir else ""))  # type: ignore[attr-defined]
                if found.include is not None:
                    return bool(found.include)
        return False

    def _absolute(self, path: Path) -> Path:
        """Return the path below the resolved source, without resolving links on the way."""
        return (
            self._resolved / path.relative_to(self._source)
            if path.is_relative_to(self._source)
            else path
        )


def _check(source: Path, files: dict[str, Path]) -> None:
    """Refuse what the service would refuse, with the names that the user knows."""
    sizes = sorted(((file.stat().st_size, name) for name, file in files.items()), reverse=True)
    total_bytes = sum(size for size, _ in sizes)
    if total_bytes > MAX_UNPACKED_BYTES or len(files) > MAX_FILES:
        largest = ", ".join(f"{name} ({size >> 20} MiB)" for size, name in sizes[:3])
        raise UsageError(
            f"{source} has {len(files)} files, {total_bytes >> 20} MiB; the limit is {MAX_FILES} "
            f"files and {MAX_UNPACKED_BYTES >> 20} MiB. List data in .everstepignore; the largest "
            f"files are {largest}"
        )
    problems = collisions(files.keys())
    if problems:
        raise UsageError("; ".join(problems))
    if not any(name.endswith(".py") for name in files):
        raise UsageError(
            f"{source} contains no Python module; give the directory that contains your package"
        )


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
