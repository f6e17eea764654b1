"""From files to batches: records, tokens, order, tensors.

Owns: everything up to the tensors of one micro-batch. Does not own: processes; all of this is a pure function of the
data, the options, and (in `share`) which dp rank asks.
"""

from meshlora.data.collate import IGNORED, Batch, collate
from meshlora.data.packing import joined, packed_share, with_positions
from meshlora.data.preferences import read_preferences
from meshlora.data.records import Record
from meshlora.data.references import Prompt, prompts_of
from meshlora.data.rollouts import read_rollouts
from meshlora.data.sampler import GlobalBatches, epoch_order, share
from meshlora.data.sources import read_records
from meshlora.data.tokenization import Sequence, TokenizedDataset, tokenize

__all__ = [
    "IGNORED",
    "Batch",
    "GlobalBatches",
    "Prompt",
    "Record",
    "Sequence",
    "TokenizedDataset",
    "collate",
    "epoch_order",
    "joined",
    "packed_share",
    "prompts_of",
    "read_preferences",
    "read_records",
    "read_rollouts",
    "share",
    "tokenize",
    "with_positions",
]
