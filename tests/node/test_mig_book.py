"""What was made of GPUs outlives a restart, and what does not outlive a boot is forgotten."""

import pytest

from dra_driver.errors import NodeError
from dra_driver.model.devices import GpuUuid
from dra_driver.model.layouts import Before, Book, Outcome, State
from dra_driver.model.mig import PartitionKey
from dra_driver.node.mig_book import MigBook

GPU = GpuUuid("GPU-1")
KEY = PartitionKey(19, 3, 1, 1)
FULL = Book(
    {GPU: (KEY,)},
    {GPU: Before(True, (KEY,))},
    (GPU,),
    {GPU: Outcome("x", State.FAILED, "why")},
    {GPU: "why not"},
    "no such layout",
    State.FAILED,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state/mig.json"


def test_a_new_process_reads_what_the_last_one_wrote(path):
    MigBook(path, "boot").write(FULL)

    assert MigBook(path, "boot").read() == FULL
    assert [file.name for file in path.parent.iterdir()] == ["mig.json"]


def test_without_a_file_nothing_was_made(path):
    assert MigBook(path, "boot").read() == Book()


def test_after_a_boot_only_the_mig_mode_of_boards_is_remembered(path):
    MigBook(path, "boot").write(FULL)

    assert MigBook(path, "next").read() == Book(switched=(GPU,))


@pytest.mark.parametrize("text", ["", "{", '{"boot": 1}', '{"boot": "b", "book": {"made": []}}'])
def test_a_damaged_book_is_never_taken_for_an_empty_one(path, text):
    path.parent.mkdir()
    path.write_text(text)

    with pytest.raises(NodeError, match="cannot be understood, so it is not known which MIG"):
        MigBook(path, "boot").read()


def test_a_book_that_cannot_be_opened_is_told(path):
    path.mkdir(parents=True)

    with pytest.raises(NodeError, match=r"mig\.json cannot be read"):
        MigBook(path, "boot").read()


def test_a_book_that_cannot_be_written_is_told_and_the_old_one_stays(path):
    book = MigBook(path, "boot")
    book.write(FULL)
    path.with_suffix(".tmp").mkdir()

    with pytest.raises(NodeError, match=r"mig\.json cannot be written.*--state-dir"):
        book.write(Book())
    assert book.read() == FULL
