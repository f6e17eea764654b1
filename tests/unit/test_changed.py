"""What runs tests on a changed copy of the package says where they stood if they do not end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.changed import run_under

_WAITS = """
import subprocess, sys, time

def test_waits():
    subprocess.Popen([sys.executable, "-c", "def waits(): import time; time.sleep(600)\\nwaits()"])
    time.sleep(600)
"""


@pytest.mark.long
def test_tests_that_hang_say_where_each_process_stood(tmp_path: Path) -> None:
    (tmp_path / "test_waits.py").write_text(_WAITS)
    with pytest.raises(AssertionError, match=r"no end after 10 s") as raised:
        run_under({}, [str(tmp_path / "test_waits.py")], timeout_s=10)
    assert "in test_waits\n" in str(raised.value)
    assert "in waits\n" in str(raised.value)
