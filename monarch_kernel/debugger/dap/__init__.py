"""The Debug Adapter Protocol for ranks.

`rank_session` answers a front end's requests with the mesh debugger, without any transport: `messages` and `translate`
handle the protocol's JSON, `stop_table` tracks what is stopped, `id_table` assigns the ids, and `stop_queue` selects
the thread that is shown. `gateway` is a separate entry point: it forwards an IDE's bytes, split by `framing`, to
debugpy in a rank.
"""

from monarch_kernel.debugger.dap.messages import MOVES, RequestError, is_in_editor, refusal, response
from monarch_kernel.debugger.dap.rank_session import ERROR_FILTERS, RankSession
from monarch_kernel.debugger.dap.stop_table import DebugState

__all__ = ["ERROR_FILTERS", "MOVES", "DebugState", "RankSession", "RequestError", "is_in_editor", "refusal", "response"]
