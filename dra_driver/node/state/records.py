"""The record of a claim as the ledger writes it."""

from dataclasses import replace
from typing import Final

from dra_driver.base.codec import Codec, Undecodable
from dra_driver.model.records import ClaimRecord
from dra_driver.model.steps import CreatePartition, Step

_RECORDS: Final = Codec[ClaimRecord](ClaimRecord)


def encode_record(record: ClaimRecord) -> bytes:
    """The document of *record*: the same bytes for the same record."""
    return _RECORDS.encode(replace(record, steps=tuple(map(_recorded, record.steps))))


def decode_record(content: bytes) -> ClaimRecord:
    """The record in *content*. Undecodable says why it is none."""
    record = _RECORDS.decode(content)
    if record.completed and record.spec is None:
        raise Undecodable("ClaimRecord.spec is missing")
    return record


def _recorded(step: Step) -> Step:
    """What was begun before a crash is removed and not gone on with, so it is new to nobody."""
    return replace(step, new=False) if isinstance(step, CreatePartition) else step
