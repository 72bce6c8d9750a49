"""The Debug Adapter Protocol spoken for ranks.

`rank_session` answers a front end's requests with the mesh debugger, without any transport: `messages` and `translate`
know the protocol's JSON, `stop_table` what is stopped, `id_table` the numbers that name it, `stop_queue` which thread
is shown. `gateway` is another way in: it carries an IDE's bytes, cut by `framing`, to debugpy in a rank.
"""

from monarch_kernel.debugger.dap.messages import RequestError, refusal, response
from monarch_kernel.debugger.dap.rank_session import ERROR_FILTERS, RankSession
from monarch_kernel.debugger.dap.stop_table import DebugState
from monarch_kernel.debugger.dap.translate import MOVES

__all__ = ["ERROR_FILTERS", "MOVES", "DebugState", "RankSession", "RequestError", "refusal", "response"]
