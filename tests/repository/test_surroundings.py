"""What merges were made with."""

from __future__ import annotations

import getpass
import json
import platform
import socket

import numba
import numpy as np
import pytest

from mergegit import Repository
from mergegit.repository import surroundings as module
from mergegit.repository.surroundings import differences, surroundings


def test_programs_and_machine_are_noted() -> None:
    found = surroundings(3)
    assert found["software"]["python"] == platform.python_version()
    assert found["software"]["numpy"] == np.__version__
    assert found["software"]["numba"] == numba.__version__
    assert found["machine"]["threads"] == 3
    assert platform.machine() in found["machine"]["processor"]
    assert found["machine"]["system"].startswith(platform.system())
    assert json.loads(json.dumps(found)) == found


def test_nothing_names_the_machine_or_its_user() -> None:
    text = json.dumps(surroundings(1))
    assert socket.gethostname() not in text
    assert getpass.getuser() not in text.split('"')


def test_a_processor_without_a_name_is_its_architecture(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("proc") / "cpuinfo"
    monkeypatch.setattr(module, "_CPU_INFO", path)
    assert surroundings(1)["machine"]["processor"] == platform.machine()
    path.write_text("processor\t: 0\nmodel name\t: A Processor\n")
    assert surroundings(1)["machine"]["processor"] == f"A Processor ({platform.machine()})"


def test_merges_carry_them(merged: Repository) -> None:
    execution = merged.commit("merged").execution
    assert execution is not None
    expected = surroundings(merged.threads)
    assert (execution["software"], execution["machine"]) == (
        expected["software"], expected["machine"],
    )  # fmt: skip


def test_differences_are_named() -> None:
    here = surroundings(2)
    assert differences(here, here) == []
    assert differences({}, here) == []
    there = {
        "software": {**here["software"], "numpy": "1.0.0"},
        "machine": {**here["machine"], "processor": "Another", "threads": 64},
    }
    assert differences(there, here) == [
        f"numpy 1.0.0, here {np.__version__}",
        f"processor Another, here {here['machine']['processor']}",
    ]
