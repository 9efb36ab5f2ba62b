"""A look that fails."""

import pytest

from muster.watcher.polling import LookError
from muster.watcher.sources.reading import Look


async def why(look: Look) -> str:
    """Look in vain.

    Returns:
        Why it failed.
    """
    with pytest.raises(LookError) as caught:
        await look()
    return str(caught.value)
