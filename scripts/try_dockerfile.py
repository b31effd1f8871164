"""Execute a Dockerfile's instructions without a container engine: each RUN in a Debian root made by
debootstrap, stage by stage.

``python -m scripts.try_dockerfile --target cpu`` needs root. Debian's own Python stands in for the
base image's. At the end the programs of the image are asked for their versions as its user.
``--bind PATH`` shows a path of this machine to the instructions, for example a package index;
``--build-arg NAME=VALUE`` is as for ``docker build``.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PACKAGES = "python3,python3-venv,ca-certificates,passwd"
CHECKS = (
    "id -u | grep -qx 10001",
    "everstep --help >/dev/null && echo everstep answers",
    "ray --version",
    "python -c 'import train_fn.loop.attempt, service.process.serve, storage.make_bucket, torch; "
    'print("torch", torch.__version__)\'',
    (
        "touch /var/lib/everstep/storage/x /var/lib/everstep/home/x /var/lib/everstep/gcs/x && ! "
        "touch /opt/everstep/x 2>/dev/null"
    ),
)


@dataclass
class Stage:
    """One FROM with what follows it."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)


def read_stages(text: str, arguments: dict[str, str]) -> dict[str, Stage]:
    """The stages by name; ARG values are filled in, of ``arguments`` first. Raises ValueError for
    what is not known here."""
    values, stages = dict(arguments), dict[str, Stage]()
    stage: Stage | None = None
    joined = re.sub(r"\\\n\s*", " ", text)
    for line in (line.strip() for line in joined.splitlines()):
        if not line or line.startswith("#"):
            continue
        word, _, rest = line.partition(" ")
        if word == "ARG":
            name, _, default = rest.partition("=")
            values.setdefault(name, default)
            continue
        for name, value in values.items():
            rest = rest.replace(f"${{{name}}}", value)
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stage = stages[name] = Stage(name, base)
        elif stage is not None and word in ("RUN", "COPY", "ENV", "WORKDIR", "USER"):
            stage.instructions.append((word, rest))
        else:
            raise ValueError(
                f"{line!r}: only FROM, ARG, RUN, COPY, ENV, WORKDIR and USER are known here"
            )
    return stages


class Build:
    """Builds stages as layers below ``place``; mounts are this process's own and go with it."""

    def __init__(self, place: Path, stages: dict[str, Stage], binds: Sequence[str]) -> None:
        self._place = place
        self._stages = stages
        self._binds = ["/etc/resolv.conf", *binds]
        self._roots: dict[str, Path] = {}
        self._env: dict[str, dict[str, str]] = {}
        self._state: dict[str, tuple[str, str]] = {}
        """Working directory and user after each stage."""

    def base(self) -> Path:
        """What stands in for the base image; made once for a place."""
        root = self._place / "base"
        if not (root / "usr/local/bin/python").is_symlink():
            shutil.rmtree(root, ignore_errors=True)
            subprocess.run(
                ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", root],
                check=True,
            )
            (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        return root

    def build(self, name: str) -> Path:
        """The mounted root of a stage after its instructions. Raises CalledProcessError where one
        fails."""
        if name in self._roots:
            return self._roots[name]
        stage = self._stages[name]
        below = self.build(stage.base) if stage.base in self._stages else self.base()
        env = dict(
            self._env.get(
                stage.base, {"PATH": "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin"}
            )
        )
        root = self._layer(name, below)
        directory, user = self._state.get(stage.base, ("/", "root"))
        for word, rest in stage.instructions:
            print(f"==> [{name}] {word} {rest[:160]}", flush=True)
            match word:
                case "ENV":
                    for pair in shlex.split(rest):
                        key, _, value = pair.partition("=")
                        env[key] = value.replace("$PATH", env["PATH"])
                case "WORKDIR":
                    directory = rest
                    (root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
                case "USER":
                    user = rest
                case "COPY":
                    self._copy(root, directory, rest)
                case "RUN":
                    self.run(root, rest, env, directory, user)
        self._roots[name], self._env[name], self._state[name] = root, env, (directory, user)
        if user != "root":
            env["USER"] = user
        return root

    def environment(self, name: str) -> dict[str, str]:
        return self._env[name]

    def run(self, root: Path, command: str, env: dict[str, str], directory: str, user: str) -> None:
        """One command inside. Raises CalledProcessError."""
        pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        subprocess.run(
            ["chroot", f"--userspec={user}", root, "sh", "-c", f"cd {directory} && {command}"],
            env={**pip, **env},
            check=True,
        )

    def _layer(self, name: str, below: Path) -> Path:
        places = {part: self._place / "stages" / name / part for part in ("upper", "work", "root")}
        for path in places.values():
            path.mkdir(parents=True)
        options = f"lowerdir={below},upperdir={places['upper']},workdir={places['work']}"
        root = places["root"]
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, root], check=True)
        subprocess.run(["mount", "-t", "proc", "proc", root / "proc"], check=True)
        subprocess.run(["mount", "--rbind", "/dev", root / "dev"], check=True)
        for bind in self._binds:
            target = root / bind.lstrip("/")
            if Path(bind).is_dir():
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.touch()
            subprocess.run(["mount", "--bind", bind, target], check=True)
        return root

    def _copy(self, root: Path, directory: str, rest: str) -> None:
        words = rest.split()
        source_root = REPOSITORY
        if words[0].startswith("--from="):
            source_root = self.build(words.pop(0).removeprefix("--from="))
        *sources, target = words
        into = root / (Path(directory) / target).as_posix().lstrip("/")
        for source in sources:
            path = source_root / source.lstrip("/")
            if path.is_dir():
                shutil.copytree(
                    path,
                    into,
                    symlinks=True,
                    dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns("__pycache__"),
                )
            else:
                shutil.copy2(path, into / path.name)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--bind", action="append", default=[], metavar="PATH")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument(
        "--keep-base",
        type=Path,
        metavar="DIR",
        help="where the Debian root is kept for the next time",
    )
    arguments = parser.parse_args(argv)
    if os.environ.get("EVERSTEP_OWN_MOUNTS") != "1":
        command = [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            sys.executable,
            "-m",
            "scripts.try_dockerfile",
            *sys.argv[1:],
        ]
        return subprocess.run(
            command, env={**os.environ, "EVERSTEP_OWN_MOUNTS": "1"}, cwd=REPOSITORY, check=False
        ).returncode
    with tempfile.TemporaryDirectory(
        prefix="everstep-image-", ignore_cleanup_errors=True
    ) as temporary:
        place = arguments.keep_base or Path(temporary)
        shutil.rmtree(place / "stages", ignore_errors=True)
        place.mkdir(parents=True, exist_ok=True)
        given = dict(pair.split("=", 1) for pair in arguments.build_arg)
        build = Build(
            place, read_stages((REPOSITORY / "Dockerfile").read_text(), given), arguments.bind
        )
        try:
            root = build.build(arguments.target)
            for check in CHECKS:
                print(f"==> {check}", flush=True)
                build.run(
                    root, check, build.environment(arguments.target), "/home/everstep", "everstep"
                )
        except subprocess.CalledProcessError as exc:
            print(f"failed: {exc}", file=sys.stderr)
            return 1
        finally:
            subprocess.run(
                f"umount --recursive --lazy {place}/stages/*/root", shell=True, check=False
            )
            shutil.rmtree(place / "stages", ignore_errors=True)
    print("the image's instructions all work")
    return 0


if __name__ == "__main__":
    sys.exit(main())
