"""What ranks are forked from imports this first: it ends with the process that started it, and its ranks with it.

Left to itself it takes the whole interpreter down step by step, libraries and all, and ranks would have to look for the
end of a process that is not their parent.
"""

import os

from meshlora.common.lifetime import end_with

end_with(os.getppid())
