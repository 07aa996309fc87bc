"""`python -m cuflash launch`: processes with the environment of ranks."""

import pytest

from cuflash.distributed import SocketComm, launcher
from cuflash.distributed.host_group import address_of_environment

SAYS = """
import os, sys
names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"
line = " ".join([*(os.environ[x] for x in names), *sys.argv[1:]])
os.write(1, f"{line}\\n".encode())  # at once, so that no other rank's comes in between
"""


def run(tmp_path, text, *arguments):
    script = tmp_path / "script.py"
    script.write_text(text)
    return launcher.main([*arguments[:2], str(script), *arguments[2:]])


def test_ranks_have_their_environment(tmp_path, capfd):
    assert run(tmp_path, SAYS, "-n", "3", "--flag", "word") == 0
    said = capfd.readouterr().out.splitlines()
    assert sorted(said) == [f"{i} 3 {i} 3 127.0.0.1 --flag word" for i in range(3)]


def test_the_first_rank_that_fails_ends_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "GRACE", 0.2)
    text = "import os, time\nif os.environ['RANK'] == '1': raise SystemExit(7)\ntime.sleep(60)"
    assert run(tmp_path, text, "-n", "2") == 7


def test_sizes_that_are_none(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(tmp_path, "", "-n", "0")
    assert "--size 0: give 1 rank or more" in capsys.readouterr().err


def test_scripts_that_nobody_launched(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ValueError, match="MASTER_ADDR is not set: start ranks with python -m"):
        address_of_environment()


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_numbers_of_the_environment_that_are_none(monkeypatch, name):
    for known, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "2"}.items():
        monkeypatch.setenv(known, "two" if known == name else value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(ValueError, match=f"{name} is set to 'two': give an integer"):
        SocketComm.from_environment()
