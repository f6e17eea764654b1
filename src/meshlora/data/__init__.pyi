# What a type checker is to know of the names that `__init__.py` imports late.
from meshlora.data.batch import IGNORED as IGNORED
from meshlora.data.batch import Batch as Batch
from meshlora.data.batch import collate as collate
from meshlora.data.batch import shifted as shifted
from meshlora.data.dataset import Sequence as Sequence
from meshlora.data.dataset import TokenizedDataset as TokenizedDataset
from meshlora.data.packing import joined as joined
from meshlora.data.packing import with_positions as with_positions
from meshlora.data.preferences import read_preferences as read_preferences
from meshlora.data.records import Record as Record
from meshlora.data.rollouts import read_rollouts as read_rollouts
from meshlora.data.sampler import GlobalBatches as GlobalBatches
from meshlora.data.sampler import share as share
from meshlora.data.sources import read_records as read_records
from meshlora.data.tokenization import tokenize as tokenize
