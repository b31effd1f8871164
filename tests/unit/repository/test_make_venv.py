"""`scripts/make-venv.sh`: what it installs from where, and what it says on a machine that lacks
something. Interpreters and uv are stand-ins that write down what they are asked."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "make-venv.sh"
PROGRAMS = ("bash", "cat", "cp", "df", "dirname", "env", "head", "id", "mkdir", "realpath", "sed")
PYTHON = """#!/usr/bin/env bash
case "$*" in
--version) echo "Python $FAKE_VERSION" ;;
"-c import sys; sys.exit"*) exit "$FAKE_OUTSIDE" ;;
"-c import ensurepip"*) exit "$FAKE_NO_VENV" ;;
"-c import sys, urllib"*) echo "asks ${*: -1}" >>"$LOG"; exit "$FAKE_SILENT" ;;
"-m venv"*) echo "venv" >>"$LOG"; mkdir -p "${*: -1}/bin"; cp "$0" "${*: -1}/bin/python" ;;
"-m pip --version") ;;
"-m pip install"*" uv") [ -z "$FAKE_UV" ] || cp "$FAKE_UV" "${0%/*}/uv" ;;
"-m pip config list") echo "$FAKE_SETTINGS" ;;
"-m pip index"*) exit "$FAKE_OFFLINE" ;;
"-m pip install"*) echo "pip ${*:3}" >>"$LOG"; exit "$FAKE_PIP_FAILS" ;;
*'version("torch")'*) [ -n "$FAKE_TORCH" ] && echo "$FAKE_TORCH" ;;
esac
"""
UV = """#!/usr/bin/env bash
echo "uv $*" >>"$LOG"
if [ "$1" = venv ]; then mkdir -p "${*: -1}/bin"; cp "$FAKE_PYTHON" "${*: -1}/bin/python"; fi
[ "$1" = venv ] || exit "$FAKE_UV_FAILS"
"""


class Machine:
    """A machine without what is not given."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.bin = base / "bin"
        self.bin.mkdir()
        for name in (*PROGRAMS, "sleep", "stat", "tail", "tr"):
            (self.bin / name).symlink_to(shutil.which(name) or f"/no/{name}")
        self.add("python3", PYTHON)
        self.venv = base / "a place" / ".venv"
        self.venv.parent.mkdir()

    def add(self, name: str, text: str) -> None:
        (self.bin / name).unlink(missing_ok=True)
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def make(self, **fakes: str) -> tuple[int, str, list[str]]:
        """Run the script. Return its exit code, all that it printed, and what was done."""
        log = self.base / "log"
        log.write_text("")
        names = ("OUTSIDE", "NO_VENV", "SILENT", "PIP_FAILS", "UV_FAILS", "OFFLINE")
        env = {
            **{f"FAKE_{name}": "0" for name in names},
            "FAKE_TORCH": "",
            "FAKE_UV": "",
            "FAKE_SETTINGS": "",
            "FAKE_VERSION": "3.13.5",
            "FAKE_PYTHON": str(self.bin / "python3"),
            "PATH": str(self.bin),
            "LOG": str(log),
            **fakes,
        }
        done = subprocess.run(
            ["bash", SCRIPT, self.venv, "server"],
            env=env,
            cwd=self.base,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout + done.stderr, log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


no_gpu = pytest.mark.skipif(
    Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists(),
    reason="this machine has an NVIDIA GPU",
)


@no_gpu
def test_torch_without_cuda_comes_alone_from_its_index(machine: Machine) -> None:
    code, said, done = machine.make(TORCH_INDEX="https://torch.example.org/cpu")
    assert code == 0 and "since this machine has no NVIDIA GPU" in said
    assert "Making" in said and " s\n" in said, "each phase says its seconds"
    venv, asked, torch, rest = done
    assert (venv, asked) == ("venv", "asks https://torch.example.org/cpu")
    assert "--index-url https://torch.example.org/cpu --no-deps torch torchvision" in torch
    assert rest.endswith("--editable .[server]") and "index" not in rest
    assert all("--constraint constraints.txt" in line for line in (torch, rest))


@no_gpu
def test_an_index_that_is_silent_is_said_in_one_line(machine: Machine) -> None:
    code, said, done = machine.make(FAKE_SILENT="1")
    assert code == 0 and said.count("No index with torch for CPUs answers") == 1
    assert [line.split()[0] for line in done] == ["venv", "asks", "pip"]


def test_uv_is_used_where_it_is_and_pip_where_it_fails(machine: Machine) -> None:
    machine.add("uv", UV)
    code, _, done = machine.make(TORCH_INDEX="")
    assert code == 0 and [line.split()[0] for line in done] == ["uv", "uv"]
    assert "--constraint constraints.txt --editable .[server]" in done[1]
    code, said, done = machine.make(TORCH_INDEX="", FAKE_UV_FAILS="2")
    assert code == 0 and "uv failed; pip tries the same" in said
    assert [line.split()[0] for line in done] == ["uv", "pip"]
    assert machine.make(FAKE_UV_FAILS="2", FAKE_PIP_FAILS="1")[0] == 1


@pytest.mark.parametrize(
    ("fakes", "says"),
    [
        ({"FAKE_OUTSIDE": "1", "FAKE_VERSION": "3.10.12"}, "3.11 to 3.14, and here is Python 3.10"),
        ({"FAKE_OUTSIDE": "1", "FAKE_VERSION": "3.15.0"}, "make PYTHON=/path/to/python3.13"),
        ({"FAKE_NO_VENV": "1"}, "sudo apt-get install python3-venv"),
        ({"PYTHON": "/no/python"}, "here is no /no/python"),
    ],
)
def test_a_python_that_will_not_do_is_refused_with_the_way_out(
    machine: Machine, fakes: dict[str, str], says: str
) -> None:
    code, said, done = machine.make(**fakes)
    assert code == 1 and says in said and "install uv" in said
    assert not any(line.startswith("pip") for line in done)


def test_a_machine_without_python_or_network_is_told_so_in_one_line(machine: Machine) -> None:
    code, said, done = machine.make(FAKE_OFFLINE="1")
    assert code == 1 and done == ["venv"]
    assert said.splitlines()[-1].startswith("No package index answers (pip asked https://pypi.org")
    (machine.bin / "python3").unlink()
    shutil.rmtree(machine.venv)
    code, said, _ = machine.make()
    assert code == 1 and "here is no python3" in said
    assert "sudo apt-get install python3 python3-venv" in said


@no_gpu
def test_room_is_asked_for_the_torch_that_comes(machine: Machine) -> None:
    machine.add("df", "#!/usr/bin/env bash\necho Avail\necho ' 4000M'\n")
    code, said, done = machine.make(FAKE_SILENT="1")
    assert code == 1 and "has 4000 MB free, and the environment needs 9000 MB" in said
    assert "make VENV=/path" in said and "TORCH_INDEX=" in said
    assert not any(line.startswith("pip") for line in done)
    assert machine.make()[0] == 0


def test_a_download_that_breaks_ends_with_what_to_do_and_the_next_try_goes_on(
    machine: Machine,
) -> None:
    code, said, _ = machine.make(TORCH_INDEX="", FAKE_PIP_FAILS="1")
    assert code == 1 and said.splitlines()[-1].endswith("Run the same command again: it goes on.")
    code, said, done = machine.make(TORCH_INDEX="")
    assert code == 0 and "Installed:" in said
    assert [line.split()[0] for line in done] == ["pip"], "the environment is made once"
