"""The end of a run's log says why the run failed."""

import re

import pytest

from headwater.runs.log import cause, last_words

PROGRESS = (
    "step 3/12  loss 2.5000  1,000 tokens/s  2 s left\nstep 4: validation 2.5000 bits per byte\n"
)
TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1\nMemoryError: no room\n'
CHAIN = 'Traceback (most recent call last):\n  File "x.py"\nKeyError: 3\n\nDuring it another:\n\n'


@pytest.mark.parametrize(
    ("text", "code", "expected"),
    [
        ("warning\nheadwater: a checkpoint differs:\n  lr: 1\n", 1, "differs:\n.*lr: 1$"),
        (TRACEBACK + PROGRESS, 1, "^MemoryError: no room$"),
        (CHAIN + TRACEBACK + "It is a note", 1, "^MemoryError: no room\n    It is a note$"),
        ("sh: no python\n", 127, "^sh: no python$"),
        (TRACEBACK.partition("MemoryError")[0], 1, 'File "x.py", line 1$'),  # the disk is full
        (PROGRESS, -9, r"signal 9 \(Killed\), as the system does when memory runs out$"),
        (PROGRESS, 1, "^it left no message$"),
    ],
)
def test_the_cause_of_a_failed_run_is_its_last_message_or_error(text, code, expected):
    assert re.search(expected, cause(text, code), re.DOTALL)


def test_last_words_are_those_of_a_run_that_did_not_go_on(tmp_path):
    log = tmp_path / "log.txt"
    assert last_words(log) == ""
    log.write_text(PROGRESS + "headwater: the loss is not finite.\n  Try a lower --lr\n")
    assert last_words(log) == "its last words were: the loss is not finite. Try a lower --lr"
    log.write_text(log.read_text() + PROGRESS)  # it was started again and goes on
    assert last_words(log) == ""
    log.write_text("headwater: " + "x" * 1000)
    assert len(last_words(log)) < 400
