"""The Debug Adapter Protocol spoken for ranks: translation between DAP and the mesh debugger, without any transport."""

from monarch_kernel.debugger.dap.rank_session import ERROR_FILTERS, RankSession
from monarch_kernel.debugger.dap.translate import MOVES, RequestError, refusal, response

__all__ = ["ERROR_FILTERS", "MOVES", "RankSession", "RequestError", "refusal", "response"]
