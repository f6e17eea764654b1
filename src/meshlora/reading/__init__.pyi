# What a type checker is to know of the names that `__init__.py` imports late.
from meshlora.reading.packing import joined as joined
from meshlora.reading.packing import with_positions as with_positions
from meshlora.reading.preferences import read_preferences as read_preferences
from meshlora.reading.records import Record as Record
from meshlora.reading.rollouts import read_rollouts as read_rollouts
from meshlora.reading.sampler import GlobalBatches as GlobalBatches
from meshlora.reading.sampler import share as share
from meshlora.reading.sources import read_records as read_records
from meshlora.reading.tokenization import tokenize as tokenize
from meshlora.train.batch import IGNORED as IGNORED
from meshlora.train.batch import Batch as Batch
from meshlora.train.batch import collate as collate
from meshlora.train.batch import shifted as shifted
from meshlora_ground.dataset import Sequence as Sequence
from meshlora_ground.dataset import TokenizedDataset as TokenizedDataset
