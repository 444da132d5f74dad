"""Results of runs as files hold them."""

from headwater.runs.results import code_of


def test_the_hash_of_the_code_is_of_its_python_files(tmp_path):
    """Runs of one release may be by two versions of its files."""
    (tmp_path / "part").mkdir(parents=True)
    hashes = []
    for name, text in (("a.py", "1"), ("part/b.py", "2"), ("part/b.py", "3"), ("notes.txt", "4")):
        (tmp_path / name).write_text(text)
        code_of.cache_clear()
        hashes.append(code_of(tmp_path))
    code_of.cache_clear()
    assert len({*hashes[:3]}) == 3
    assert hashes[3] == hashes[2]
