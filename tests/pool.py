"""The pool of ranks that the tests share is the one that `meshlora verify` runs on."""

from __future__ import annotations

from meshlora.verify.pool import Pool as Pool
from meshlora.verify.pool import RankError as RankError
