"""A directory of code as an archive: without what git and ``.everstepignore`` leave out, and the
same bytes for the same files."""

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
    modules,
)
from everstep.errors import UsageError

IGNORE_FILES = (".everstepignore", ".gitignore")
"""By precedence: what the first says of a file counts, whatever the second says."""
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
_SUFFIXES = (".zip", ".tar.gz", ".tgz")


def pack(path: str | os.PathLike[str]) -> bytes:
    """The archive of a directory, of one ``.py`` file, or of what is an archive already.

    Raises UsageError: nothing is there, it holds no module, too much, a link that leads out of it,
    or a module under a name that is not free.
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
            f"{source} makes an archive of more than {MAX_ARCHIVE_BYTES >> 20} MiB; list data in "
            ".everstepignore"
        )
    return data


def _files_of(source: Path) -> dict[str, Path]:
    """Files by their path in the archive."""
    if not source.is_dir():
        raise UsageError(f"{source} does not exist; give the directory that holds your package")
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
                f"{path} is a link to a directory or out of {source}; list it in .everstepignore, "
                "or put the files there"
            )
        elif stat.S_ISREG(path.stat().st_mode):
            yield path


class _Ignored:
    """What the ignore files of a directory, of those below it, and of the repository around it
    leave out."""

    def __init__(self, source: Path) -> None:
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
        """Take the ignore files of a directory into account."""
        from pathspec import GitIgnoreSpec

        for name in IGNORE_FILES:
            file = directory / name
            if file.is_file():
                lines = file.read_text(errors="replace").splitlines()
                self._specs[name, self._absolute(directory)] = GitIgnoreSpec.from_lines(lines)

    def leaves_out(self, path: Path, *, is_dir: bool) -> bool:
        """The innermost file that says something of a path decides, as git has it."""
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
        """Below the resolved source, without resolving links on the way."""
        return (
            self._resolved / path.relative_to(self._source)
            if path.is_relative_to(self._source)
            else path
        )


def _check(source: Path, files: dict[str, Path]) -> None:
    """Find here what the service would refuse, with the names that the user knows."""
    sizes = sorted(((file.stat().st_size, name) for name, file in files.items()), reverse=True)
    total_bytes = sum(size for size, _ in sizes)
    if total_bytes > MAX_UNPACKED_BYTES or len(files) > MAX_FILES:
        largest = ", ".join(f"{name} ({size >> 20} MiB)" for size, name in sizes[:3])
        raise UsageError(
            f"{source} holds {len(files)} files, {total_bytes >> 20} MiB; at most {MAX_FILES} and "
            f"{MAX_UNPACKED_BYTES >> 20} MiB "
            f"can be uploaded; list data in .everstepignore. The largest: {largest}"
        )
    problems = collisions(files.keys())
    if problems:
        raise UsageError("; ".join(problems))
    if not modules(files.keys()):
        raise UsageError(
            f"{source} holds no Python module; give the directory that holds your package"
        )


def _archive(files: dict[str, Path]) -> bytes:
    """A tar.gz that depends on names, contents and the executable bit alone."""
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
