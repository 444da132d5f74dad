import pytest

from headwater.cli import main


@pytest.fixture
def command(capsys):
    """Runs a command, and returns what it printed: the error where it should fail."""

    def run(*words, code=0):
        exit_code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        assert exit_code == code, err
        return err if code else out

    return run
