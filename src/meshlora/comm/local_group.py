"""The process group of ranks on one machine: nothing of it can be reached by anybody else.

Owns: a group that torch.distributed knows by rank, size and name, whose ranks find each other through their store and
have sockets in a folder of their own (`comm.links`). Does not own: the collectives, which are direct messages
(`comm.direct`); who opens groups (`comm.groups`).

gloo would listen on a port, and any user of the machine may connect to a port, on loopback too. So these ranks have no
gloo at all. The store is a file in a folder of this user alone. torch's own collectives are refused by torch on such a
group: it has no backend for them.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import Backend, Store

from meshlora.common.compat import NamedGroup

BACKEND = "meshlora_local"


class LocalGroup(NamedGroup):
    """Ranks of one machine. Made by torch.distributed for the backend `BACKEND`.

    Attributes:
        store: of this group alone. timeout_s: how long a rank waits for the others.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.store, self.timeout_s = store, timeout.total_seconds()
        self._rank, self._size, self._round = rank, size, 0

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def name(self) -> str:
        return BACKEND

    def told_to_all(self, own: bytes) -> list[bytes]:
        """`own` of every rank, in their order. Every rank of the group calls it equally often.

        Raises:
            RuntimeError: a rank did not come in time.
        """
        self._round += 1
        self.store.set(f"{self._round}/{self._rank}", own.hex())
        keys = [f"{self._round}/{rank}" for rank in range(self._size)]
        try:
            self.store.wait(keys, timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise RuntimeError(f"Timed out waiting {self.timeout_s:g} s for ranks of the group to come") from error
        return [bytes.fromhex(self.store.get(key).decode()) for key in keys]


def register() -> None:
    """Tell torch.distributed of the backend, once in a process."""
    if BACKEND not in Backend.backend_list:
        Backend.register_backend(BACKEND, LocalGroup, devices=["cpu"])
