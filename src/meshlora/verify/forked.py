"""The first import of the fork server: ties its lifetime, and so that of its ranks, to the process that started it.

Without it the server would tear down the interpreter step by step, and ranks would have to watch a process that is not
their parent.
"""

import os

from meshlora_ground.lifetime import end_with

end_with(os.getppid())
