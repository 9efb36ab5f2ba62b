"""One coordinator process: open the state, serve, drain, close."""

from muster.service.app.ports import StartError
from muster.service.app.serving import serve

__all__ = ["StartError", "serve"]
